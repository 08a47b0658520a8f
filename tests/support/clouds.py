"""Simulated clouds for tests: each a process of its own, its state on disk, and a hand on its control API.

`FakeCloud.kill` is SIGKILL; `start` after it goes on at the same address with the same state. Whatever the
cloud says of itself comes from `truth`, which no fault can touch.
"""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
import orjson
import yaml

from app import processes

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0

# A cloud for most tests: two regions, Spot and OnDemand, boots at once, no lag, tokens that count.
SMALL: dict[str, Any] = {
    "cloud": "fake",
    "account": "acct-1",
    "regions": ["r1", "r2"],
    "life": {"boot_s": 0},
    "offers": [
        {"accelerator": "H100", "counts": [1, 2, 4, 8], "usd_per_hour": {"Spot": "2.00", "OnDemand": "4.00"}},
        {"accelerator": "T4", "counts": [1], "usd_per_hour": {"Spot": "0.20", "OnDemand": "0.40"}},
        {"usd_per_hour": {"OnDemand": "0.10"}},
    ],
}


class FakeCloud:
    """One simulator process. Use `running`, or `start` and `close`."""

    def __init__(self, folder: Path, *, scenario: Mapping[str, Any] | Path, simulator: str = "fake") -> None:
        """``folder`` keeps scenario, log and state; ``simulator`` is the folder under ``providers/``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.simulator = simulator
        self.log = folder / f"{simulator}.log"
        self.url = ""
        self._state = folder / "state"
        self._module = f"providers.{simulator}.simulator"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        if isinstance(scenario, Path):
            self.scenario_file = scenario
        else:
            self.scenario_file = folder / "scenario.yaml"
            self.scenario_file.write_text(yaml.safe_dump(dict(scenario), sort_keys=False))

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, *, scenario: Mapping[str, Any] | Path, simulator: str = "fake"
    ) -> AsyncIterator[Self]:
        cloud = cls(folder, scenario=scenario, simulator=simulator)
        try:
            await cloud.start()
            yield cloud
        finally:
            await cloud.close()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    async def start(self) -> None:
        """Start the process, or start it again at the same address; returns once it listens.

        Raises:
            RuntimeError: it ended, or said nothing for ``START_S``; with the end of its log.
        """
        while not await self._try_start():
            self._port = 0  # somebody took the port that looked free

    async def _try_start(self) -> bool:
        again = bool(self._port)
        self._port = self._port or processes.free_ports(1)[0]
        seen = self.log.stat().st_size if self.log.exists() else 0
        argv = [sys.executable, "-m", self._module, "--scenario", self.scenario_file]
        argv += ["--state", self._state, "--port", str(self._port)]
        self._process = processes.spawn(argv, log=self.log, cwd=ROOT)
        deadline = time.monotonic() + START_S
        while True:
            said = self.log.read_bytes()[seen:].decode(errors="replace")
            line = next((line for line in said.splitlines(True) if line.startswith("listening on ")), "")
            if line.endswith("\n"):
                self.url = line.removeprefix("listening on ").strip()
                return True
            if not again and self._process.poll() is not None and "Address already in use" in said:
                return False
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._module} did not start:\n{processes.tail(self.log)}")
            await asyncio.sleep(0.02)

    async def reset(self, scenario: Mapping[str, Any]) -> None:
        """Begin anew with this scenario and nothing remembered, in the same process, which is far faster.

        For use between tests, while nothing is on its way to the cloud.
        """
        self.scenario_file.write_text(yaml.safe_dump(dict(scenario), sort_keys=False))
        if not self.runs:
            shutil.rmtree(self._state, ignore_errors=True)
            await self.start()
        else:
            await self.control("POST", "/sim/reset")

    async def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL, and wait."""
        await self._end(signal.SIGKILL)

    async def close(self) -> None:
        """End the process and the control client."""
        if self._process is not None:
            await self.kill()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _end(self, how: signal.Signals) -> int:
        assert self._process is not None, "not started"
        process, self._process = self._process, None
        await asyncio.to_thread(processes.stop, process, grace_s=10, ask=how)
        return process.returncode

    # --- the truth --------------------------------------------------------------------------------

    async def truth(self, *, name: str | None = None, image: str | None = None) -> dict[str, Any]:
        """``machines``, ``creates`` (received, by name), ``calls`` (by verb), ``capacity``, ``bill_usd``.

        ``name`` or ``image``: of the machines of that one alone.
        """
        wanted = {key: value for key, value in (("name", name), ("image", image)) if value is not None}
        return await self.control("GET", f"/sim/truth?{urlencode(wanted)}")

    async def machines(self, *, name: str | None = None, image: str | None = None) -> list[dict[str, Any]]:
        """Every machine that ever was, phantoms left out."""
        return [m for m in (await self.truth(name=name, image=image))["machines"] if not m["phantom"]]

    async def alive(self) -> list[dict[str, Any]]:
        """The machines that are there now, in any state but gone."""
        return [machine for machine in await self.machines() if machine["state"] != "gone"]

    async def creates(self) -> dict[str, int]:
        """How many creates arrived for each machine name, whatever became of them."""
        return dict((await self.truth())["creates"])

    async def bill_usd(self) -> Decimal:
        return Decimal((await self.truth())["bill_usd"])

    async def until(
        self, holds: Callable[[dict[str, Any]], bool], *, within_s: float = 20.0, what: str = "the condition"
    ) -> dict[str, Any]:
        """The first truth for which ``holds`` is true.

        Raises:
            AssertionError: it did not become true in time; with what was true instead.
        """
        deadline = time.monotonic() + within_s
        while True:
            truth = await self.truth()
            if holds(truth):
                return truth
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come true within {within_s:g} s: {truth}")
            await asyncio.sleep(0.05)

    # --- the hands of fate ------------------------------------------------------------------------

    async def add_fault(self, kind: str, **fields: Any) -> str:
        """Add a fault, for the next matching call unless told otherwise; its id.

        Kinds and fields are those of `providers.simulation.faults.Fault`.
        """
        return str((await self.control("POST", "/sim/faults", {"kind": kind, **fields}))["id"])

    async def clear_faults(self, fault_id: str | None = None) -> None:
        await self.control("DELETE", "/sim/faults" + (f"/{fault_id}" if fault_id else ""))

    async def pause(self, **fields: Any) -> str:
        """Matching calls (all of them without fields) wait, before their effect unless ``when="after"``."""
        return str((await self.control("POST", "/sim/pause", fields))["id"])

    async def resume(self, fault_id: str) -> None:
        await self.clear_faults(fault_id)

    async def set_capacity(
        self, units: int | None, *, tier: str, accelerator: str | None = None, region: str = ""
    ) -> None:
        """So many GPUs from now on; None for no limit. Machines that are there stay."""
        body = {"units": units, "tier": tier, "accelerator": accelerator, "region": region}
        await self.control("POST", "/sim/capacity", body)

    async def set_price(
        self, usd_per_hour: str | None, *, tier: str, accelerator: str | None = None, region: str = ""
    ) -> None:
        body = {"usd_per_hour": usd_per_hour, "tier": tier, "accelerator": accelerator, "region": region}
        await self.control("POST", "/sim/price", body)

    async def set_life(self, **fields: Any) -> None:
        """Other durations (those of `providers.simulation.scenario.Life`) for what begins from now on."""
        await self.control("POST", "/sim/life", fields)

    async def plant(self, **fields: Any) -> dict[str, Any]:
        """A machine nobody ordered; ``name region tier accelerator count state account``, all optional."""
        return await self.control("POST", "/sim/machines", fields)

    async def preempt(self, machine_id: str) -> None:
        await self.control("POST", f"/sim/machines/{machine_id}/preempt")

    async def exit(self, machine_id: str, *, code: int) -> None:
        await self.control("POST", f"/sim/machines/{machine_id}/exit", {"code": code})

    async def fail(self, machine_id: str, *, message: str = "the machine broke") -> None:
        await self.control("POST", f"/sim/machines/{machine_id}/fail", {"message": message})

    async def set_health(
        self,
        machine_id: str,
        *,
        status: int | None = None,
        open_: bool | None = None,
        location: str = "",
    ) -> None:
        """How its workload answers at its ports from now on (a scenario with ``serve``); 0: never."""
        body = {"status": status, "open": open_, "location": location}
        await self.control("POST", f"/sim/machines/{machine_id}/health", body)

    async def requests(self, machine_id: str) -> list[dict[str, Any]]:
        """What the workload of a machine was asked, each with ``port``, ``path`` and ``headers``."""
        (machine,) = [each for each in await self.machines() if each["id"] == machine_id]
        return list(machine["requests"])

    async def remove(self, machine_id: str) -> None:
        """It disappears without a word."""
        await self.control("POST", f"/sim/machines/{machine_id}/remove")

    async def put_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A key, template or login that nobody ordered here; ``name region machine``, all optional."""
        return await self.control("POST", "/sim/parts", {"kind": kind, **fields})

    async def parts(self) -> list[dict[str, Any]]:
        """Those that are there."""
        return [part for part in (await self.control("GET", "/sim/parts"))["items"] if not part["dropped"]]

    async def rename(self, machine_id: str, name: str | None) -> None:
        """Somebody edits its name, and with it its identity; None takes it off."""
        await self.control("POST", f"/sim/machines/{machine_id}/rename", {"name": name})

    async def control(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the control API.

        Raises:
            AssertionError: it was refused; with the reason.
        """
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        data = None if body is None else orjson.dumps(body)
        async with self._http.request(method, self.url + path, data=data) as response:
            answer = await response.read()
        assert response.status < 300, f"{method} {path}: {response.status} {answer.decode(errors='replace')}"
        return orjson.loads(answer)
