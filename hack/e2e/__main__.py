"""``python -m hack.e2e``: a release on a real node, from a bare machine, as root. Leaves nothing behind.

Everything runs in namespaces of its own (network, mounts, processes, IPC, host name): whatever ends the
first process in them, SIGKILL of this one included, the kernel ends the rest and takes mounts, addresses and
nftables tables away. What has no namespace, a folder of cgroups and the state, is removed here, and looked
for at the end; what a killed run had no time to remove, the next one removes when it begins.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
import yaml

from app.processes import Scratch, spawn, stop
from hack.cluster import binaries
from hack.cluster.golang import NoGo
from hack.e2e import images, packages, remains
from hack.e2e.containerfile import ContainerfileError
from hack.e2e.inside import NAMESPACES, Plan
from hack.e2e.steps import NAMES

ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "nebula-e2e-"  # of a run's folder of cgroups; its pid follows
_NEED_BYTES = 6 << 30
_APART = ("--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
_GONE_S = 10.0


@click.command(help=__doc__)
@click.option("--until", type=click.Choice(NAMES), help="Stop after this step.")
@click.option("--skip", multiple=True, type=click.Choice(NAMES), help="Leave a step out.")
@click.option(
    "--helm",
    type=click.Choice(["3", "4"]),
    default="4",
    show_default=True,
    help="Its major version; the step `previous` takes the other one.",
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / ".run" / "e2e",
    show_default=True,
    help="Where logs go when it fails.",
)
@click.option("--prepare", is_flag=True, help="Only build what is needed.")
def main(until: str | None, skip: tuple[str, ...], helm: str, logs: Path, prepare: bool) -> None:
    _check_machine()
    began_s = time.monotonic()
    chart = yaml.safe_load((ROOT / "chart" / "Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "chart" / "values.yaml").read_text())
    kubernetes, helms = binaries.build(), binaries.build(binaries.HELM)
    node = binaries.build(binaries.NODE)
    found = packages.ready()
    made = images.ready(
        version=str(chart["appVersion"]),
        postgres_major=int(values["database"]["bundled"]["majorVersion"]),
        say=_say,
    )
    for image in made.all():
        _say(f"image {image.name}: {image.size_bytes / 1e6:.0f} MB")
    if prepare:
        return
    _say(f"prepared in {time.monotonic() - began_s:.0f} s")
    signal.signal(signal.SIGTERM, _interrupt)
    scratch = Scratch("e2e", need_bytes=_NEED_BYTES, in_memory=False)
    state = scratch.path
    before = remains.Machine.now(packages=found)
    entered: frozenset[str] = frozenset()
    code = 1
    try:
        for root in _cgroup_roots():
            sweep_cgroups(root)
        with _cgroups(f"{_PREFIX}{os.getpid()}") as cgroup:
            plan = Plan(
                state=state,
                kubernetes=kubernetes,
                node=node,
                helm=helms,
                helm_major=int(helm),
                packages=found,
                nebula=made.nebula,
                previous=made.previous,
                previous_chart=images.source_at(made.previous_revision, state / "previous") / "chart",
                postgres=made.postgres,
                pause=made.pause,
                cgroup=cgroup,
                until=until,
                skip=skip,
            )
            code = _run_apart(plan.write(), log=state / "story.log")
    finally:
        if (state / NAMESPACES).exists():
            entered = frozenset(json.loads((state / NAMESPACES).read_text()).values())
        if code != 0:
            _keep_logs(state, logs)
        scratch.close()
    left = remains.left(state, cgroups=_cgroup_folders(cgroup), namespaces=entered, within_s=_GONE_S)
    left += before.new_on(remains.Machine.now(packages=found))
    for each in left:
        _say(f"LEFT BEHIND: {each}")
    _say(
        f"{'passed' if code == 0 else 'failed'} after {time.monotonic() - began_s:.0f} s; "
        f"{len(left) or 'nothing'} left behind"
    )
    sys.exit(code or bool(left))


def _run_apart(plan: Path, *, log: Path) -> int:
    """Run the inside to its end and show what it says. Its processes end with it, and it ends with us."""
    unshare = shutil.which("unshare") or "/usr/bin/unshare"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    argv: list[str | Path] = [
        unshare,
        *_APART,
        "--propagation",
        "private",
        sys.executable,
        "-m",
        "hack.e2e.inside",
        plan,
    ]
    process = spawn(argv, log=log, env=environment, cwd=ROOT)
    try:
        with log.open() as shown:
            while True:
                over = process.poll() is not None
                sys.stdout.write(shown.read())
                sys.stdout.flush()
                if over:
                    return process.returncode
                time.sleep(0.2)
    except KeyboardInterrupt:
        return 130
    finally:
        stop(process, grace_s=0.1)  # and with it, by the kernel, everybody inside


@contextmanager
def _cgroups(name: str) -> Iterator[str]:
    """A folder of that name in every hierarchy, for the kubelet to work below; removed with all in it."""
    folders = _cgroup_folders(name)
    try:
        for folder in folders:
            folder.mkdir()
            for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one of version 1
                given, own = folder.parent / setting, folder / setting
                if given.exists() and own.exists() and not own.read_text().strip():
                    own.write_text(given.read_text())
        yield name
    finally:
        deadline_s = time.monotonic() + _GONE_S
        while any(folder.exists() for folder in folders) and time.monotonic() < deadline_s:
            for folder in folders:
                _remove_cgroup(folder)
            time.sleep(0.1)


def sweep_cgroups(root: Path) -> None:
    """Remove below ``root`` what dead runs left; a folder that a process is in cannot be removed."""
    for folder in root.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX)
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove_cgroup(folder)


def _remove_cgroup(folder: Path) -> None:
    """With all below it; what a process is still in, just ending, stays."""
    below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*below, folder]:
        with contextlib.suppress(OSError):
            path.rmdir()


def _cgroup_folders(name: str) -> list[Path]:
    return [root / name for root in _cgroup_roots()]


def _cgroup_roots() -> list[Path]:
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(line[1]) for line in lines if line[2] in ("cgroup", "cgroup2")]


def _keep_logs(state: Path, logs: Path) -> None:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for path in (
        *state.glob("*.log"),
        *state.glob("*.txt"),
        *state.glob("control-plane/*.log"),
        *state.glob("node/*.log"),
    ):
        shutil.copy(path, logs)
    _say(f"logs are in {logs}")


def _check_machine() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise click.ClickException("this needs Linux and root: it starts a kubelet in namespaces of its own")
    if missing := [
        name for name in ("unshare", "mount", "ip", "chroot", "ldd") if shutil.which(name) is None
    ]:
        raise click.ClickException(f"install what has {', '.join(missing)} (util-linux, iproute2, coreutils)")


def _say(text: str) -> None:
    click.echo(f"e2e: {text}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (
        binaries.BuildFailed,
        NoGo,
        packages.NoPackages,
        images.NoPostgres,
        images.NoHistory,
        ContainerfileError,
    ) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
