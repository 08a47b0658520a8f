"""Starting a simulator: scenario, state folder and engine, and the same three options for every cloud."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from providers.simulation import control, scenario
from providers.simulation.engine import Engine
from providers.simulation.http import Answer, serve
from providers.simulation.sockets import LOOPBACK
from providers.simulation.state import Journal, StateError

Routes = Callable[[Engine], Sequence[BaseRoute]]


def run(
    routes: Routes,
    *,
    default: str,
    scenario_file: Path | None,
    state: Path,
    port: int,
    host: str = LOOPBACK,
) -> None:
    """Serve one simulated cloud until SIGTERM or Ctrl-C. ``default`` is the scenario's text without a file.

    It believes whoever reaches it: ``host`` is loopback, unless somebody means to let others in.

    Raises:
        scenario.ScenarioError, StateError, OSError: it cannot start; the message says why.
    """

    def facts() -> scenario.Scenario:
        if scenario_file is None:
            return scenario.parse(default, source="default scenario")
        return scenario.load(scenario_file)

    cloud = _Cloud(routes, facts=facts, state=state, host=host)
    try:
        asyncio.run(serve(cloud, port=port, host=host))
    finally:
        cloud.close()


class _Cloud:
    """The application over the engine of now: ``POST /sim/reset`` puts a new and empty one in its place."""

    def __init__(
        self, routes: Routes, *, facts: Callable[[], scenario.Scenario], state: Path, host: str
    ) -> None:
        self._routes = routes
        self._host = host
        self._facts = facts
        self._state = state
        self._open(facts())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def close(self) -> None:
        self._engine.close()
        self._journal.close()

    def _open(self, facts: scenario.Scenario) -> None:
        self._journal = Journal(self._state)
        try:
            engine = Engine(facts, self._journal, host=self._host)
        except BaseException:
            self._journal.close()
            raise
        self._engine = engine
        reset = control.route(engine, "POST", "/sim/reset", self._reset)
        self._app = Starlette(routes=[*self._routes(engine), *control.routes(engine), reset])

    def _reset(self, _request: Request, _json: Any) -> Answer:
        """Read the scenario again, forget everything, begin anew. For tests that share one process."""
        facts = self._facts()  # first: a wrong scenario changes nothing
        self._engine.faults.clear()  # calls that are held must not wait for ever
        self._engine.close()
        self._journal.close()
        self._journal.remove()
        self._open(facts)
        return Answer(body={})


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
