"""Runs a Containerfile on a folder instead of a registry's image, for a machine without a container engine.

The instructions that ours uses, and an error for every other one. ``RUN`` is a chroot with mounts of its own
(the kernel takes them away with the last process), with this machine's resolver and pip settings lent to it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LENT = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs")
_PASSED = (
    "PIP_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
_ENTER = """\
set -e
mount -t proc proc "$ROOT/proc"
mount -t tmpfs tmpfs "$ROOT/dev" && mkdir -m 1777 "$ROOT/dev/shm"
for name in null zero full random urandom; do
  : >"$ROOT/dev/$name"
  mount --bind "/dev/$name" "$ROOT/dev/$name"
done
for path in $LENT; do
  [ -e "$path" ] || continue
  if [ -d "$path" ]; then
    mkdir -p "$ROOT$path"
  elif [ ! -e "$ROOT$path" ]; then
    mkdir -p "$ROOT$(dirname "$path")"
    : >"$ROOT$path"
  fi
  mount --bind "$path" "$ROOT$path"
done
exec chroot "$ROOT" /bin/sh -c "cd \\"\\$0\\" && exec /bin/sh -c \\"\\$1\\"" "$FOLDER" "$COMMAND"
"""


class ContainerfileError(RuntimeError):
    """An instruction that is not known here, or that failed; the message ends with what it said."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage: its files, and what the image's configuration says."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def build(file: Path, *, context: Path, base: Path, work: Path, arguments: dict[str, str]) -> Stage:
    """Return the last stage. ``base`` is what a ``FROM`` of no earlier stage means; ``work`` takes stages.

    Raises:
        ContainerfileError: see there.
    """
    stages: dict[str, Stage] = {}
    known = dict(arguments)
    stage: Stage | None = None
    for name, rest in _instructions(file.read_text()):
        if name == "ARG":
            key, _, default = rest.partition("=")
            known.setdefault(key, _filled(default, known))
            continue
        if name == "FROM":
            words = rest.split()
            title = words[2] if len(words) == 3 else str(len(stages))
            from_stage = stages.get(_filled(words[0], known))
            root = work / f"stage-{title}"
            _copy_tree(from_stage.root if from_stage else base, root)
            stage = stages[title] = Stage(root=root)
            continue
        if stage is None:
            raise ContainerfileError(f"{name} comes before FROM")
        _apply(stage, name, rest, known=known, stages=stages, context=context)
    if stage is None:
        raise ContainerfileError(f"{file} has no FROM")
    return stage


def _apply(
    stage: Stage, name: str, rest: str, *, known: dict[str, str], stages: dict[str, Stage], context: Path
) -> None:
    match name:
        case "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "COPY":
            words = rest.split()
            source, skip = context, "__pycache__"  # as .containerignore says
            if words[0].startswith("--from="):
                source, skip = stages[words.pop(0).removeprefix("--from=")].root, ""
            *froms, to = words
            for each in froms:
                target = stage.root / os.path.join(stage.folder, to).lstrip("/")
                _copy(source / each.lstrip("/"), target, to, skip=skip)
        case "RUN":
            _run(stage, rest, known)
        case "ENV":
            stage.environment |= dict(_pairs(rest, known))
        case "LABEL":
            stage.labels |= dict(_pairs(rest, known))
        case "USER":
            stage.user = rest
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "CMD":
            stage.command = json.loads(rest)
        case _:
            raise ContainerfileError(f"{name} is not known here: add it to {__name__}")


def _run(stage: Stage, command: str, known: dict[str, str]) -> None:
    passed = {key: value for key, value in os.environ.items() if key.startswith(_PASSED)}
    lent = [
        *_LENT,
        *(value for key, value in passed.items() if value.startswith("/") and key != "PIP_CACHE_DIR"),
    ]
    environment = (
        {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        | passed
        | known
        | stage.environment
        | {"ROOT": str(stage.root), "LENT": " ".join(lent), "FOLDER": stage.folder, "COMMAND": command}
    )
    apart = ["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    done = subprocess.run(
        ["/usr/bin/unshare", *apart, "/bin/sh", "-c", _ENTER],
        env=environment | {"PATH": f"{environment['PATH']}:/usr/sbin:/sbin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ContainerfileError(f"RUN {command[:200]}\nended with {done.returncode}:\n{done.stdout[-4000:]}")


def _instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    found = []
    for line in joined.splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            found.append((name.upper(), rest.strip()))
    return found


def _filled(text: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), text)


def _pairs(text: str, known: dict[str, str]) -> list[tuple[str, str]]:
    pairs = []
    for word in shlex.split(_filled(text, known)):
        key, _, value = word.partition("=")
        pairs.append((key, value))
    return pairs


def _copy(source: Path, target: Path, to: str, *, skip: str) -> None:
    if not source.exists():
        raise ContainerfileError(f"COPY {source}: it is not there")
    if source.is_dir():
        _copy_tree(source, target, skip=skip)
    else:
        into = target / source.name if to.endswith(("/", ".")) else target
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, into)


def _copy_tree(source: Path, target: Path, *, skip: str = "") -> None:
    ignored = shutil.ignore_patterns(skip) if skip else None
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
