"""``nebula simulate CLOUD``: a cloud on the loopback interface, for tests, demos and trying out policies.

A simulator is a module ``providers.CLOUD.simulator``, or an entry point of the group ``nebula.simulators``
that names its ``run``. It is imported only when it is started.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click

import providers

Run = Callable[..., None]  # (scenario, state, port), and host= where it is not loopback

ENTRY_POINTS = "nebula.simulators"


class _Simulators(click.Group):
    """One subcommand for each simulator that is installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        packages = [info.name for info in pkgutil.iter_modules(providers.__path__) if info.ispkg]
        ours = {name for name in packages if importlib.util.find_spec(f"providers.{name}.simulator")}
        return sorted(ours | importlib.metadata.entry_points(group=ENTRY_POINTS).names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in self.list_commands(ctx) else None


@click.group("simulate", cls=_Simulators)
def command() -> None:
    """Run a simulated cloud, with its own wire protocol, on 127.0.0.1."""


def _command(name: str) -> click.Command:
    @click.command(name, short_help=f"The simulated cloud {name}.")
    @click.option(
        "--scenario",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="What the cloud is like, a YAML file. Default: a small cloud with a bit of everything.",
    )
    @click.option(
        "--state",
        required=True,
        type=click.Path(file_okay=False, path_type=Path),
        help="The folder that keeps the cloud's state; a restart goes on from it.",
    )
    @click.option("--port", type=click.IntRange(0, 65535), default=0, help="0 takes a free one.")
    @click.option(
        "--host",
        default=None,
        help="Listen for others, too; * is every address. Whoever reaches it can use it. [127.0.0.1]",
    )
    def start(scenario: Path | None, state: Path, port: int, host: str | None) -> None:
        """Serve until SIGTERM or Ctrl-C; the first line printed says where it listens."""
        try:
            _run_of(name)(scenario, state, port, **({} if host is None else {"host": host}))
        except (ValueError, OSError) as error:
            click.echo(str(error), err=True)
            sys.exit(1)

    return start


def _run_of(name: str) -> Run:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return cast(Run, entry.load())
    return cast(Run, importlib.import_module(f"providers.{name}.simulator").run)
