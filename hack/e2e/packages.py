"""containerd, runc, CNI plugins and nft, from the machine or from Debian packages unpacked into the cache.

Nothing is installed: a package is fetched by apt's own client and unpacked into a folder of ours, so that the
machine is afterwards what it was. What is on PATH already is taken from there.
"""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import binaries

_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "nft")
_PLUGINS = ("ptp", "host-local", "loopback")
_CNI_FOLDERS = (Path("/opt/cni/bin"), Path("/usr/lib/cni"))
_PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "nftables",
    # what these link to, and a small system may lack
    "libnftables1",
    "libnftnl11",
    "libmnl0",
    "libxtables12",
    "libjansson4",
    "libgmp10",
    "libedit2",
    "libbsd0",
    "libmd0",
    "libseccomp2",
)


class NoPackages(RuntimeError):
    """The programs are neither on the machine nor to be had from its package index; the message says so."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they are: folders for PATH and LD_LIBRARY_PATH (may be empty), and that of the CNI plugins."""

    paths: tuple[Path, ...]
    libraries: tuple[Path, ...]
    plugins: Path

    def environment(self) -> dict[str, str]:
        """This process's own, with these programs and what they load first."""
        environment = dict(os.environ)
        paths = [*self.paths, Path("/usr/sbin"), Path("/sbin")]
        environment["PATH"] = os.pathsep.join([*map(str, paths), environment.get("PATH", "/usr/bin:/bin")])
        if self.libraries:
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, self.libraries))
        return environment


def ready() -> Programs:
    """Return the programs, fetched when the machine lacks one (36 MB, some seconds, once).

    Raises:
        NoPackages: see there.
    """
    plugins = [folder for folder in _CNI_FOLDERS if all((folder / name).exists() for name in _PLUGINS)]
    if plugins and all(shutil.which(name) for name in _PROGRAMS):
        return Programs(paths=(), libraries=(), plugins=plugins[0])
    home = binaries.cache() / "packages" / hashlib.sha256(" ".join(_PACKAGES).encode()).hexdigest()[:16]
    if not home.exists():
        _fetch(home)
    return Programs(
        paths=(home / "usr" / "bin", home / "usr" / "sbin"),
        libraries=tuple(sorted({path.parent for path in home.rglob("lib*.so.*")})),
        plugins=home / "usr" / "lib" / "cni",
    )


def _fetch(home: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoPackages(
            f"install {', '.join(_PROGRAMS)} and the CNI plugins {', '.join(_PLUGINS)} in {_CNI_FOLDERS[0]}:"
            " this machine lacks some of them, and has no apt to fetch them with"
        )
    new = home.with_name(f"{home.name}.{os.getpid()}.new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "debs").mkdir(parents=True)
    fetch = ["apt-get", "download", *_PACKAGES]
    done = subprocess.run(fetch, cwd=new / "debs", capture_output=True, text=True, check=False)
    if done.returncode != 0:  # a machine that has never asked its index
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        done = subprocess.run(fetch, cwd=new / "debs", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(new, ignore_errors=True)
        raise NoPackages(f"apt-get download failed:\n{done.stderr.strip()[-2000:]}")
    for package in sorted((new / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, new], check=True)
    shutil.rmtree(new / "debs")
    try:
        new.rename(home)
    except OSError:  # somebody else was faster
        shutil.rmtree(new, ignore_errors=True)
