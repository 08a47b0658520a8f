"""``python -m hack.cluster``: build the local Kubernetes; run it before our eyes, or behind us."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import click

from app.processes import lock_file, tail
from hack.cluster import ClusterFailed, ControlPlane, binaries
from hack.cluster.golang import NoGo

_STATE = Path(__file__).resolve().parent.parent.parent / ".run" / "cluster"
_UP_S = 1800.0  # the build included
_DOWN_S = 30.0

_state_option = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=_STATE,
    help="Folder that keeps objects, certificates and logs for the next time (default: .run/cluster).",
)


@click.group(help=__doc__)
def main() -> None:
    # Both mean an orderly end; a shell's background job would otherwise ignore the first.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


@main.command()
def build() -> None:
    """Build etcd, API server, controller manager, scheduler and kubectl into the shared cache."""
    click.echo(binaries.build())


@main.command()
@_state_option
def run(state: Path) -> None:
    """Run a control plane until Ctrl-C, and print the line that points kubectl to it."""
    with ControlPlane(state=state) as plane:
        click.echo(f"export KUBECONFIG={plane.kubeconfig}")
        click.echo(f"export PATH={plane.kubectl.parent}:$PATH", err=True)
        click.echo(
            f"Kubernetes {binaries.kubernetes_version()} at {plane.server}; Ctrl-C stops it.", err=True
        )
        sys.stdout.flush()
        (state / "ready").write_text(str(os.getpid()))
        try:
            while True:
                plane.check()
                time.sleep(0.5)
        finally:
            (state / "ready").unlink(missing_ok=True)
            click.echo("stopping", err=True)


@main.command()
@_state_option
def up(state: Path) -> None:
    """Start a control plane that runs on behind us; `down` ends it."""
    binaries.build()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    ready, log = state / "ready", state / "run.log"
    if (pid := _holder(state)) is not None:
        raise click.ClickException(f"process {pid} runs it already: `python -m hack.cluster down` ends it")
    ready.unlink(missing_ok=True)
    with log.open("wb") as output:
        runner = subprocess.Popen(
            [sys.executable, "-m", "hack.cluster", "run", "--state", str(state)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=Path(__file__).resolve().parent.parent.parent,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + _UP_S
    try:
        while not ready.exists():
            if runner.poll() is not None or time.monotonic() > deadline_s:
                raise click.ClickException(f"it did not start:\n{tail(log)}")
            time.sleep(0.1)
    except BaseException:
        runner.terminate()
        runner.wait()
        raise
    click.echo(f"export KUBECONFIG={state.absolute() / 'admin.kubeconfig'}")


@main.command()
@_state_option
def down(state: Path) -> None:
    """End the control plane that `up` or `run` started. None running is a success."""
    deadline_s = time.monotonic() + _DOWN_S
    while (pid := _holder(state)) is not None:
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"process {pid} does not end")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)


def _holder(state: Path) -> int | None:
    """The process that holds the state's lock: while it is held, the number in it is that process's."""
    lock = state / "lock"
    if not lock.exists():
        return None
    if (handle := lock_file(lock)) is not None:
        os.close(handle)
        return None
    text = lock.read_text()
    return int(text) if text else None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (ClusterFailed, binaries.BuildFailed, NoGo) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
