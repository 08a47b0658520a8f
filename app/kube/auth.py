"""How to reach the API server, and as whom: the only place that imports the Kubernetes client library.

Its configuration loaders are used, its generated models are not: importing any part of the library runs
its root package, which loads 768 modules and 35 MiB, so two empty stand-ins take the root's and the client's
place while the loaders are imported, and go again. A test pins the version for which this is known to work.

Credentials rotate. Files are read again at most once a minute, exec plugins are run again before their token
expires, and everything is loaded afresh when the server says 401. A changed CA or client certificate gives a
new TLS context, which new connections use.
"""

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import os
import ssl
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import structlog
import yaml

log = structlog.get_logger()

LIBRARY = "kubernetes_asyncio"
REREAD_S = 60.0  # how old a token or certificate read from a file may be
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RETRY_S = 5.0  # after a failed refresh, while the old credentials may still do
LOAD_S = 60.0  # an exec plugin that has not answered by then is given up


class NoCluster(Exception):
    """No usable configuration for an API server was found; the message says where it was looked for."""


class Configuration:
    """What a loader fills in. It stands in for the library's class of that name."""

    def __init__(self) -> None:
        self.host = ""
        self.ssl_ca_cert: str | None = None
        self.cert_file: str | None = None
        self.key_file: str | None = None
        self.verify_ssl = True
        self.tls_server_name: str | None = None
        self.proxy: str | None = None
        self.api_key: dict[str, str] = {}
        self.refresh_api_key_hook: Any = None


class _Source(Protocol):
    async def load(self, *, afresh: bool) -> Configuration:
        """The credentials as they are now; ``afresh`` trusts nothing remembered from earlier loads."""
        ...


class Connection:
    """Address, TLS and credentials of one API server. Made by `connect`.

    ``ssl``, ``server_hostname`` and ``proxy`` are to be read for each request, after `headers`.
    """

    def __init__(self, source: _Source, configuration: Configuration, *, reread_s: float = REREAD_S) -> None:
        self._source = source
        self._reread_s = reread_s
        self._lock = asyncio.Lock()
        self._fingerprint = ""
        self._renew_at = 0.0
        self.base_url = ""
        self.ssl: ssl.SSLContext | None = None
        self.server_hostname: str | None = None
        self.proxy: str | None = None
        self._headers: dict[str, str] = {}
        self._apply(configuration)

    async def headers(self) -> dict[str, str]:
        """The headers that authenticate one request now. Cheap: seldom reads a file."""
        if time.monotonic() >= self._reread_at:
            async with self._lock:
                if time.monotonic() >= self._reread_at:
                    await self._load(afresh=False)
        return self._headers

    async def renew(self, refused: dict[str, str]) -> None:
        """Load everything again after a 401 for ``refused``, unless somebody else just did."""
        async with self._lock:
            if self._headers is refused and time.monotonic() >= self._renew_at:
                # Credentials that are refused for good must not mean one run of a plugin per request.
                self._renew_at = time.monotonic() + RETRY_S
                await self._load(afresh=True)

    async def _load(self, *, afresh: bool) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                self._apply(await self._source.load(afresh=afresh))
        except Exception as error:  # the loaders raise anything; the old credentials may still do
            self._reread_at = time.monotonic() + RETRY_S
            text = f"{type(error).__name__}: {error}"[:256]
            log.warning("kubernetes credentials not refreshed", error=text)

    def _apply(self, configuration: Configuration) -> None:
        if configuration.host.startswith("https"):
            fingerprint = _fingerprint(configuration)
            if fingerprint != self._fingerprint:
                self.ssl = _context(configuration)
                self._fingerprint = fingerprint
        self.base_url = configuration.host.rstrip("/")
        self.server_hostname = configuration.tls_server_name
        self.proxy = configuration.proxy or _environment_proxy(self.base_url)
        token = configuration.api_key.get("BearerToken", "").strip()
        self._headers = {"Authorization": token} if token else {}
        self._reread_at = time.monotonic() + self._reread_s


async def connect(
    *, kubeconfig: str | None = None, context: str | None = None, reread_s: float = REREAD_S
) -> Connection:
    """Find the API server: by ``kubeconfig``, else ``KUBECONFIG``, else in the cluster that we run in, else
    ``~/.kube/config``.

    The first two may name several files; the first to define something wins, as in kubectl.

    Raises:
        NoCluster: none of them is usable.
    """
    source = _find(kubeconfig, context)
    try:
        async with asyncio.timeout(LOAD_S):
            return Connection(source, await source.load(afresh=True), reread_s=reread_s)
    except NoCluster:
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__  # YAML's own run over several lines
        raise NoCluster(f"cannot use the configuration of {source}: {words}") from error


def _find(kubeconfig: str | None, context: str | None) -> _Source:
    paths = kubeconfig or os.environ.get("KUBECONFIG")
    if paths:
        return _Kubeconfig(paths, context)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return _InCluster()
    return _Kubeconfig(str(Path.home() / ".kube" / "config"), context)


class _InCluster:
    """The ServiceAccount of the Pod that we run in; its token file is replaced by the kubelet."""

    def __init__(self, folder: Path = SERVICE_ACCOUNT) -> None:
        self._folder = folder

    async def load(self, *, afresh: bool) -> Configuration:
        loaders = _loaders()
        configuration = Configuration()
        loaders.incluster.InClusterConfigLoader(
            token_filename=str(self._folder / "token"),
            cert_filename=str(self._folder / "ca.crt"),
            try_refresh_token=False,  # a new loader each time reads the file, whatever its age
        ).load_and_set(configuration)
        return configuration

    def __str__(self) -> str:
        return "the Pod's ServiceAccount"


class _Kubeconfig:
    """One or more kubeconfig files, merged as kubectl merges them."""

    def __init__(self, paths: str, context: str | None) -> None:
        self._paths = paths
        self._context = context
        self._loader: Any = None

    async def load(self, *, afresh: bool) -> Configuration:
        if afresh or self._loader is None:
            self._loader = self._read()
        elif _runs_plugin(self._loader) and not hasattr(self._loader, "exec_plugin_expiry"):
            # A plugin that names no expiry is asked again only when the server refuses what it gave.
            self._loader.exec_plugin_expiry = _loaders().kubeconfig.parse_rfc3339("9999-01-01T00:00:00Z")
        configuration = Configuration()
        await self._loader.load_and_set(configuration)
        return configuration

    def _read(self) -> Any:
        module = _loaders().kubeconfig
        files, current = _usable(self._paths)
        if not files:
            raise NoCluster(f"no kubeconfig at {self._paths}, and not running in a cluster")
        loader = module._get_kube_config_loader_for_yaml_file(
            os.pathsep.join(files), active_context=self._context or current, persist_config=True
        )
        if loader._user is None:  # an anonymous context; the library expects a user section
            loader._user = module.ConfigNode("user", {})
        return loader

    def __str__(self) -> str:
        return self._paths


def _runs_plugin(loader: Any) -> bool:
    return "exec" in loader._user


def _usable(paths: str) -> tuple[list[str], str | None]:
    """The files of ``paths`` that hold anything, and the current context: the first one named.

    The library would take the last one named, and fails on an empty file.
    """
    files: list[str] = []
    current: str | None = None
    for path in paths.split(os.pathsep):
        file = Path(path).expanduser()
        if not path or not file.is_file():
            continue
        content = yaml.safe_load(file.read_text())
        if not isinstance(content, dict):
            continue
        files.append(str(file))
        current = current or content.get("current-context") or None
    return files, current


class _Loaders(NamedTuple):
    incluster: ModuleType
    kubeconfig: ModuleType


@functools.cache
def _loaders() -> _Loaders:
    """The library's two loader modules, imported without its root package and its generated client."""
    spec = importlib.util.find_spec(LIBRARY)
    if spec is None or spec.submodule_search_locations is None:
        raise NoCluster(f"the Python package {LIBRARY} is not installed")
    hidden = _take_out()  # somebody else may have imported the real one
    root, client = ModuleType(LIBRARY), ModuleType(f"{LIBRARY}.client")
    root.__path__ = list(spec.submodule_search_locations)
    vars(client).update(ApiClient=object, Configuration=Configuration)
    sys.modules.update({LIBRARY: root, f"{LIBRARY}.client": client})
    try:
        return _Loaders(
            importlib.import_module(f"{LIBRARY}.config.incluster_config"),
            importlib.import_module(f"{LIBRARY}.config.kube_config"),
        )
    finally:
        _take_out()
        sys.modules.update(hidden)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == LIBRARY or name.startswith(LIBRARY + ".")]
    return {name: sys.modules.pop(name) for name in names}


def _context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    # Cluster CAs are often made without the key usage that newer Pythons insist on; kubectl takes them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _fingerprint(configuration: Configuration) -> str:
    digest = hashlib.sha256(str(configuration.verify_ssl).encode())
    for path in (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file):
        digest.update(hashlib.sha256(Path(path).read_bytes() if path else b"").digest())
    return digest.hexdigest()


def _environment_proxy(base_url: str) -> str | None:
    """The proxy of the environment for ``base_url``. Asked once: per request it costs more than the rest."""
    url = urllib.parse.urlsplit(base_url)
    proxies = urllib.request.getproxies_environment()
    bypass = urllib.request.proxy_bypass_environment(url.hostname or "", proxies)  # type: ignore[attr-defined]
    return None if bypass else proxies.get(url.scheme)
