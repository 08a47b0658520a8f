"""The way to a real API server through a proxy that can be told to misbehave."""

import base64
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.support.proxy import Proxy, Target


def api_server_of(kubeconfig: Path) -> Target:
    """Where the API server of a kubeconfig listens."""
    url = urlsplit(_cluster(yaml.safe_load(kubeconfig.read_text()))["server"])
    assert url.hostname
    return url.hostname, url.port or 443


def kubeconfig_through(proxy: Proxy, kubeconfig: Path, folder: Path) -> Path:
    """A copy of ``kubeconfig`` whose server is the proxy; it must stay usable from another folder."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster = _cluster(config)
    cluster["tls-server-name"] = urlsplit(cluster["server"]).hostname
    cluster["server"] = f"https://127.0.0.1:{proxy.port}"
    for section in [cluster, *(user["user"] for user in config["users"])]:
        for field in ("certificate-authority", "client-certificate", "client-key"):
            if field in section:
                content = kubeconfig.parent.joinpath(section.pop(field)).read_bytes()
                section[f"{field}-data"] = base64.b64encode(content).decode()
    path = folder / "through-proxy.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _cluster(config: dict) -> dict:
    context = next(
        each["context"] for each in config["contexts"] if each["name"] == config["current-context"]
    )
    return next(each["cluster"] for each in config["clusters"] if each["name"] == context["cluster"])
