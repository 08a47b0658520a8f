"""A base image without a registry: this machine's interpreter, a shell and its tools, and their libraries.

It stands for a slim Python image in the end-to-end test and in nothing else: what the image of a release is
built on is the first argument of the Containerfile. Every path in it is that of an ordinary merged-usr
system, the interpreter lies in /usr/local as in the official images.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TOOLS = (
    *("sh", "env", "cat", "ls", "mkdir", "rm", "rmdir", "mv", "cp", "ln", "chmod", "chown", "touch", "find"),
    *("sed", "grep", "sort", "head", "tail", "wc", "tr", "cut", "date", "id", "getent", "sleep", "mktemp"),
    *("basename", "dirname", "uname", "true", "false", "pwd", "du"),
)
_FOLDERS = ("etc/ssl/certs", "proc", "sys", "dev", "run", "root", "tmp", "var/tmp", "opt", "usr/local/bin")
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_LEFT_OUT = ("test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "site-packages", "dist-packages")
_PASSWD = """\
root:x:0:0:root:/root:/bin/sh
postgres:x:999:999:postgres:/tmp:/bin/sh
nebula:x:65532:65532:nebula:/tmp:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
"""
_GROUP = "root:x:0:\npostgres:x:999:\nnebula:x:65532:\nnogroup:x:65534:\n"
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
# What wheels take for granted and no tool here links to: the compiler's runtime, and names kept by glibc.
_OFTEN = (
    *("libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "librt.so.1", "libdl.so.2", "libutil.so.1"),
    *("libm.so.6", "libresolv.so.2", "libcrypt.so.1", "libz.so.1", "libnss_files.so.2", "libnss_dns.so.2"),
)
_LOADED = re.compile(r"(?:=> )?(/\S+) \(0x")


def make(target: Path, *, python: bool, tools: Iterable[str] = TOOLS) -> None:
    """Make the root file system in ``target``, which must not exist.

    Raises:
        FileNotFoundError: this machine lacks one of the tools.
    """
    target.mkdir(parents=True)
    for link, to in _MERGED.items():
        (target / to).mkdir(parents=True, exist_ok=True)
        (target / link).symlink_to(to)
    for folder in _FOLDERS:
        (target / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (target / folder).chmod(0o1777)
    (target / "etc" / "passwd").write_text(_PASSWD)
    (target / "etc" / "group").write_text(_GROUP)
    (target / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for bundle in _BUNDLES:
        if Path(bundle).exists():
            shutil.copyfile(bundle, target / "etc" / "ssl" / "certs" / "ca-certificates.crt")
            break
    for name in tools:
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found is None:
            raise FileNotFoundError(f"this machine has no {name}, which the base image needs")
        shutil.copy2(Path(found).resolve(), target / "usr" / "bin" / name)
        _libraries(Path(found).resolve(), target)
    if python:
        _interpreter(target)
        _often(target)


def add_libraries(programs: Iterable[Path], target: Path) -> None:
    """Copy what these programs load from this machine, each to the path at which it is found."""
    for program in programs:
        _libraries(program, target)


def _interpreter(target: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = Path(sys.base_prefix)
    local = target / "usr" / "local"
    program = Path(os.path.realpath(sys.executable))
    shutil.copy2(program, local / "bin" / version)
    for name in ("python3", "python"):
        (local / "bin" / name).symlink_to(version)
    library = home / "lib" / version
    shutil.copytree(
        library,
        local / "lib" / version,
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", *_LEFT_OUT, "config-*"),
    )
    (local / "lib" / version / "site-packages").mkdir(exist_ok=True)
    wheels = Path("/usr/share/python-wheels")  # where Debian keeps what venv puts into a new environment
    if home == Path("/usr") and wheels.is_dir():
        shutil.copytree(wheels, target / "usr" / "share" / "python-wheels")
    _libraries(program, target)
    for extension in (local / "lib" / version / "lib-dynload").glob("*.so"):
        _libraries(library / "lib-dynload" / extension.name, target)


def _often(target: Path) -> None:
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin") or "ldconfig"
    known = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    for name in _OFTEN:
        for line in known.splitlines():
            words = line.split()
            if words[:1] == [name] and "32-bit" not in line and "x32" not in line:
                copy = target / "usr" / "lib" / name
                shutil.copy2(Path(words[-1]).resolve(), copy)
                _libraries(Path(words[-1]).resolve(), target)
                break


def _libraries(program: Path, target: Path) -> None:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for name in _LOADED.findall(listed):
        place = Path(name)
        if not name.startswith(
            ("/lib", "/usr/lib")
        ):  # one of the interpreter's own folder: where it is found
            place = Path("/usr/lib") / place.name
        copy = target / place.relative_to("/")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(name).resolve(), copy)
