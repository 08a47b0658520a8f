"""Starting a simulator: scenario, state folder and engine, and the same three options for every cloud."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from providers.simulation import control, scenario
from providers.simulation.engine import Engine
from providers.simulation.http import serve
from providers.simulation.state import Journal, StateError

Routes = Callable[[Engine], Sequence[BaseRoute]]


def run(routes: Routes, *, default: str, scenario_file: Path | None, state: Path, port: int) -> None:
    """Serve one simulated cloud until SIGTERM or Ctrl-C. ``default`` is the scenario's text without a file.

    Raises:
        scenario.ScenarioError, StateError, OSError: it cannot start; the message says why.
    """
    facts = (
        scenario.load(scenario_file) if scenario_file else scenario.parse(default, source="default scenario")
    )
    journal = Journal(state)
    try:
        engine = Engine(facts, journal)
        app = Starlette(routes=[*routes(engine), *control.routes(engine)])
        asyncio.run(serve(app, port=port))
    finally:
        journal.close()


def main(start: Callable[[Path | None, Path, int], None], argv: Sequence[str] | None = None) -> int:
    """``python -m providers.CLOUD.simulator``: options, then `run`; errors in one line each."""
    parser = argparse.ArgumentParser(description="A simulated cloud on the loopback interface.")
    parser.add_argument(
        "--scenario", type=Path, help="YAML file; default: a small cloud with a bit of everything"
    )
    parser.add_argument("--state", type=Path, required=True, help="folder that keeps the cloud's state")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    options = parser.parse_args(argv)
    try:
        start(options.scenario, options.state, options.port)
    except (scenario.ScenarioError, StateError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
