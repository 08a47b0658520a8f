"""Asks running workloads at their endpoints whether they have started, are ready, and live.

The rules are the kubelet's: thresholds in a row, nothing before the initial delay, readiness and liveness
only once the startup probe has passed, and nothing more of a run that was found dead. A redirect is followed
on the workload's own host and port alone.

What differs comes from asking over a wide network. A silent workload may be our own lost network, so a run is
found dead for want of a connection only if something of its cloud has been heard since it fell silent; an
address that is not known yet counts for nothing. What a new leader finds written as ready stays so until a
probe says otherwise. Answers are never shown but for their status, and headers never at all.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import structlog
from multidict import CIMultiDict
from yarl import URL

from app.inventory.places import Place, place_of
from app.kube.client import Obj
from app.kube.patches import timestamp
from app.workload.probes import Exec, HttpGet, Probe, ProbeKind, probes
from providers.base import Machine, ProviderError, Ref

log = structlog.get_logger()

PARALLEL = 512  # probes under way: each holds a socket
REDIRECTS = 10
AGENT = "kube-probe/nebula"  # many servers know it by its beginning
_REDIRECTIONS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the container's status says: ``started`` and ``ready``."""

    started: bool
    ready: bool


HEALTHY = Health(started=True, ready=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one probe found. ``reached``: somebody answered, so that our own network is not at fault."""

    passed: bool
    message: str = ""
    reached: bool = True


@dataclass(slots=True)
class Tally:
    """The results of one probe in a row. ``passing``: what counts now, None before anything does."""

    probe: Probe
    passing: bool | None
    last: bool | None = None
    times: int = 0
    since: float = 0.0
    """When the row began."""

    def count(self, passed: bool, *, at: float) -> bool:
        """Add one result; whether it was the one that the threshold asks for, or a later one."""
        if passed != self.last:
            self.last, self.times, self.since = passed, 0, at
        self.times += 1
        enough = self.times >= (self.probe.successes if passed else self.probe.failures)
        if enough:
            self.passing = passed
        return enough

    @property
    def just_enough(self) -> bool:
        """Whether the last result is the first of its row that counts."""
        return self.times == (self.probe.successes if self.last else self.probe.failures)


@dataclass(slots=True)
class _Run:
    """One run of a workload on its machine."""

    uid: str
    key: tuple[Any, ...]
    machine: Machine
    tallies: Mapping[ProbeKind, Tally]
    since: float
    resumed: bool
    started: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def health(self) -> Health:
        readiness = self.tallies.get(ProbeKind.READINESS)
        started = self.started.is_set()
        return Health(started=started, ready=started and (readiness is None or readiness.passing is True))


RunCommand = Callable[[Ref, tuple[str, ...], float], Awaitable[int]]
"""Runs a command beside the workload of a machine, for so many seconds at most; its exit code.

Raises:
    ProviderError: it was not run.
    TimeoutError: it ran for longer. A wait for its turn is none of that.
"""


class Prober:
    """The probes of one virtual node's Pods.

    ``changed`` is called with a Pod's UID when its `Health` has; ``dead`` with UID, reason and the probe's
    own grace in seconds when its run is to be cut off; ``failing`` with UID and reason for people, once for
    each row of failures. None of them may block.
    """

    def __init__(
        self,
        *,
        changed: Callable[[str], None],
        dead: Callable[[str, str, float | None], None],
        failing: Callable[[str, str], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
        rng: random.Random,
        run_command: RunCommand,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep, self._run_command = sleep, run_command
        self._changed, self._dead, self._failing = changed, dead, failing
        self._clock, self._now, self._rng = clock, now, rng
        self._runs: dict[str, _Run] = {}
        self._places = asyncio.Semaphore(PARALLEL)
        self._heard_at = float("-inf")
        self._group: asyncio.TaskGroup | None = None
        self._http: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Probe until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=False)
        async with (
            aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            self._http, self._group = http, group
            for run in self._runs.values():
                self._start(run)
            await asyncio.Event().wait()

    def heard(self) -> None:
        """The cloud has answered us just now, so that our way to it is open."""
        self._heard_at = self._clock()

    def follow(self, pod: Obj, machine: Machine) -> Health:
        """The health of a Pod whose machine is running now; begins to probe where it has probes."""
        uid, container = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        wanted = probes(container)
        if not wanted:
            return HEALTHY
        held = _status_of(pod)
        began: Any = machine.started_at
        key = (machine.ref, began if began is not None else held.get("restartCount", 0))
        run = self._runs.get(uid)
        if run is None or run.key != key:
            self.forget(uid)
            run = self._runs[uid] = self._begin(uid, key, machine, wanted, held)
            self._start(run)
        run.machine = machine  # its address may have changed
        return run.health

    def forget(self, uid: str) -> None:
        """Probe the Pod no more; any UID may be given."""
        run = self._runs.pop(uid, None)
        for task in run.tasks if run is not None else ():
            task.cancel()

    def _begin(
        self, uid: str, key: tuple[Any, ...], machine: Machine, wanted: tuple[Probe, ...], held: Obj
    ) -> _Run:
        """A run from its beginning, or, where the Pod's status tells of it already, from where it stood."""
        told = (held.get("state") or {}).get("running", {}).get("startedAt")
        same = machine.started_at is None or told == timestamp(machine.started_at)
        resumed = told is not None and same and _id_of(machine.ref) == held.get("containerID")
        elapsed_s = 0.0
        if resumed:
            elapsed_s = max(0.0, (self._now() - datetime.fromisoformat(told)).total_seconds())
        startup = any(probe.kind is ProbeKind.STARTUP for probe in wanted)
        tallies = {probe.kind: Tally(probe, passing=None) for probe in wanted}
        run = _Run(
            uid=uid,
            key=key,
            machine=machine,
            tallies=tallies,
            since=self._clock() - elapsed_s,
            resumed=resumed,
        )
        if not startup or (resumed and held.get("started")):
            run.started.set()
        if resumed and held.get("ready") and (readiness := tallies.get(ProbeKind.READINESS)) is not None:
            readiness.passing = True
        return run

    def _start(self, run: _Run) -> None:
        if self._group is not None and not run.tasks:
            run.tasks = [
                self._group.create_task(self._repeat(run, tally), name=f"{kind.field} of {run.uid}")
                for kind, tally in run.tallies.items()
                if not (kind is ProbeKind.STARTUP and run.started.is_set())
            ]

    async def _repeat(self, run: _Run, tally: Tally) -> None:
        """One probe of one run, period by period, until it has nothing more to say."""
        probe = tally.probe
        if probe.kind is not ProbeKind.STARTUP:
            await run.started.wait()
        wait_s = run.since + probe.initial_delay_s - self._clock()
        if run.resumed:  # all Pods of a former leader begin at once
            wait_s = max(wait_s, self._rng.uniform(0.0, probe.period_s))
        await self._sleep(max(0.0, wait_s))
        while not run.dead:
            began = self._clock()
            answer = await self._ask(run, probe)
            if answer is not None and self._judge(run, tally, answer, began=began):
                return
            await self._sleep(max(0.0, began + probe.period_s - self._clock()))

    def _judge(self, run: _Run, tally: Tally, answer: Answer, *, began: float) -> bool:
        """Take one answer in; whether the probe is over."""
        if self._runs.get(run.uid) is not run or run.dead:
            return True
        probe, before = tally.probe, run.health
        if answer.reached:
            self.heard()
        enough = tally.count(answer.passed, at=began)
        message = f"{probe.kind} probe failed: {answer.message}"
        if enough and not answer.passed and tally.just_enough:
            self._failing(run.uid, message)
        over = False
        match probe.kind:
            case ProbeKind.STARTUP if enough and answer.passed:
                run.started.set()
                over = True
            case ProbeKind.STARTUP | ProbeKind.LIVENESS if enough and not answer.passed:
                if answer.reached or self._heard_at >= tally.since:
                    run.dead = over = True
                    self._dead(run.uid, message, probe.grace_s)
        if run.health != before:
            self._changed(run.uid)
        return over

    async def _ask(self, run: _Run, probe: Probe) -> Answer | None:
        """One answer; None where there is no address to ask yet."""
        async with self._places:
            try:
                # A command counts its own time, from its turn on.
                async with asyncio.timeout(None if isinstance(probe.action, Exec) else probe.timeout_s):
                    return await self._answer(run.machine, probe)
            except TimeoutError:
                return Answer(False, f"no answer within {probe.timeout_s:g} s", reached=False)
            except ProviderError as error:  # the command was not run: that says nothing about the workload
                log.info("probe's command not run", pod_uid=run.uid, error=str(error))
                return None
            except (aiohttp.ClientConnectionError, OSError) as error:
                return Answer(False, *_broken(error))
            except Exception as error:  # what it says may quote the request
                log.warning("probe failed", pod_uid=run.uid, error=type(error).__name__)
                return Answer(False, type(error).__name__)

    async def _answer(self, machine: Machine, probe: Probe) -> Answer | None:
        action = probe.action
        if isinstance(action, Exec):
            code = await self._run_command(machine.ref, action.command, probe.timeout_s)
            return Answer(code == 0, "" if code == 0 else f"command exited with {code}")
        place = place_of(machine, action.port)
        if place is None:
            return None
        if isinstance(action, HttpGet):
            return await self._get(place, action)
        _, writer = await asyncio.open_connection(place.host, place.port)
        writer.close()
        return Answer(True)

    async def _get(self, place: Place, action: HttpGet) -> Answer:
        assert self._http is not None, "run has made it"
        headers = CIMultiDict({"User-Agent": AGENT, "Accept": "*/*"})
        for name in {name.lower() for name, _ in action.headers}:
            headers.popall(name, None)
        for name, value in action.headers:
            headers.add(name, value)
        url = place.url(action.path, scheme=action.scheme)
        for _ in range(REDIRECTS):
            async with self._http.get(URL(url), headers=headers, allow_redirects=False) as response:
                status, location = response.status, response.headers.get("Location")
            if status not in _REDIRECTIONS or not location:
                break
            target = urljoin(url, location)
            if _origin(target) != _origin(url):
                break  # somebody else: that it sends us there is answer enough
            url = target
        else:
            return Answer(False, f"stopped after {REDIRECTS} redirects")
        passed = 200 <= status < 400
        return Answer(passed, "" if passed else f"HTTP probe failed with statuscode: {status}")


def _broken(error: BaseException) -> tuple[str, bool]:
    """What a connection that failed shows, and whether it was the other side that ended it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused", True
    if isinstance(cause, ConnectionResetError | BrokenPipeError | aiohttp.ServerDisconnectedError):
        return "connection closed without an answer", True
    return "no connection", False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _status_of(pod: Obj) -> Obj:
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


def _id_of(ref: Ref) -> str:
    return f"{ref.provider}://{ref.resource_id}"
