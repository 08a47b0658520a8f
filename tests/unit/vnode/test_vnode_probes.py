"""Probes of workloads that really listen on the loopback interface."""

import asyncio
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.inventory.places import Place, place_of
from app.kube.client import Obj
from app.kube.patches import timestamp
from app.kube.pki import mint_ca, mint_leaf
from app.vnode.probes import HEALTHY, Health, Prober, Tally
from app.workload.probes import Probe, ProbeKind, TcpConnect
from providers.base import Machine, PortAddress, Ref, Unavailable
from tests.unit.vnode.vnode_makers import STARTED, a_machine, a_pod

DEADLINE_S = 10.0
QUICK = {"periodSeconds": 0.02, "timeoutSeconds": 5}
CANARY = "canary-5f2d"
STARTING = Health(started=False, ready=False)
UNREADY = Health(started=True, ready=False)


@dataclass
class Workload:
    """A server whose answers are told from outside. ``status`` 0: it never answers."""

    status: int = 200
    location: str = ""
    port: int = 0
    asked: list[web.BaseRequest] = field(default_factory=list)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        if not self.status:
            await asyncio.Event().wait()
        return web.Response(status=self.status, headers={"Location": self.location} if self.location else {})

    @asynccontextmanager
    async def served(self, *, tls: ssl.SSLContext | None = None) -> AsyncIterator["Workload"]:
        runner = web.ServerRunner(web.Server(self.answer), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    @property
    def machine(self) -> Machine:
        return at(f"127.0.0.1:{self.port}")


@dataclass
class Watched:
    """A running prober, and what it told."""

    prober: Prober
    changes: int = 0
    deaths: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_health(self, pod: Obj, machine: Machine, health: Health) -> None:
        await self.until(lambda: self.prober.follow(pod, machine) == health)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async def sleep(wait_s: float) -> None:
        told.sleeps.append(wait_s)
        await asyncio.sleep(min(wait_s, 0.02))

    def changed(_uid: str) -> None:
        told.changes += 1

    async def run_command(_ref: Ref, command: tuple[str, ...], within_s: float) -> int:
        if command[0] == "late":
            await asyncio.sleep(float(command[1]) * within_s)
            return 0
        if command[0] == "unable":
            raise Unavailable("no answer")
        return int(command[1])

    prober = Prober(
        changed=changed,
        dead=lambda _uid, message, _grace_s: told.deaths.append(message),
        failing=lambda _uid, message: told.failures.append(message),
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        rng=random.Random(1),
        run_command=run_command,
        sleep=sleep,
    )
    told = Watched(prober)
    running = asyncio.create_task(prober.run())
    yield told
    running.cancel()
    await asyncio.wait([running])


def at(address: str) -> Machine:
    return a_machine(ports=(PortAddress(port=80, address=address),))


def probed(*, status: Obj | None = None, **specs: Any) -> Obj:
    """A Pod with port 80 and these probes, each with the fields of `QUICK`."""
    pod = a_pod(status=status)
    container = pod["spec"]["containers"][0]
    container["ports"] = [{"name": "web", "containerPort": 80}]
    for kind, spec in specs.items():
        container[f"{kind}Probe"] = QUICK | spec
    return pod


def http(**get: Any) -> dict[str, Any]:
    return {"httpGet": {"port": 80, **get}}


TCP = {"tcpSocket": {"port": "web"}}


def test_a_pod_without_probes_is_healthy_as_long_as_it_runs(watched: Watched) -> None:
    assert watched.prober.follow(a_pod(), a_machine()) == HEALTHY


@pytest.mark.parametrize(
    ("results", "passing"),
    [
        ("f", None),
        ("fff", False),
        ("ffpff", None),
        ("p", None),
        ("pp", True),
        ("ppff", True),
        ("ppfff", False),
    ],
)
def test_only_results_in_a_row_count(results: str, passing: bool | None) -> None:
    probe = Probe(kind=ProbeKind.READINESS, action=TcpConnect(port=80), successes=2, failures=3)
    tally = Tally(probe, passing=None)

    for result in results:
        tally.count(result == "p", at=0.0)

    assert tally.passing is passing


async def test_a_workload_is_ready_once_its_probe_passes_and_not_before(watched: Watched) -> None:
    async with Workload(status=503).served() as workload:
        pod = probed(readiness=http(path="/ready?full=1"))
        assert watched.prober.follow(pod, workload.machine) == UNREADY
        await watched.until(lambda: bool(watched.failures))
        assert watched.prober.follow(pod, workload.machine) == UNREADY

        workload.status = 200
        await watched.until_health(pod, workload.machine, HEALTHY)
        workload.status = 500
        await watched.until_health(pod, workload.machine, UNREADY)

    assert {request.path_qs for request in workload.asked} == {"/ready?full=1"}
    assert watched.failures[0] == "Readiness probe failed: HTTP probe failed with statuscode: 503"
    assert watched.deaths == []


async def test_nothing_is_told_while_nothing_changes(watched: Watched) -> None:
    async with Workload().served() as workload:
        # A busy machine may keep an answer for more than a second: that is no failure that this is about.
        patient = http() | {"timeoutSeconds": 30}
        pod = probed(readiness=patient, liveness=patient)
        await watched.until_health(pod, workload.machine, HEALTHY)
        before, asked = watched.changes, len(workload.asked)

        await watched.until(lambda: len(workload.asked) > asked + 10)

        # Before the server stops: what is probed after that fails, and is told.
        assert watched.changes == before
        assert watched.failures == []


async def test_failures_are_told_once_for_each_row_of_them(watched: Watched) -> None:
    async with Workload(status=500).served() as workload:
        watched.prober.follow(probed(readiness=http()), workload.machine)

        await watched.until(lambda: len(workload.asked) > 10)

    assert len(watched.failures) == 1


async def test_headers_are_sent_over_our_own_and_are_never_shown(watched: Watched) -> None:
    async with Workload(status=401).served() as workload:
        headers = [
            {"name": "Authorization", "value": CANARY},
            {"name": "Host", "value": "app.example.com"},
            {"name": "user-agent", "value": "mine"},
            {"name": "X-Twice", "value": "1"},
            {"name": "X-Twice", "value": "2"},
        ]
        watched.prober.follow(probed(readiness=http(httpHeaders=headers)), workload.machine)
        await watched.until(lambda: bool(watched.failures))

    sent = workload.asked[0].headers
    assert (sent["Authorization"], sent["Host"]) == (CANARY, "app.example.com")
    assert sent.getall("User-Agent") == ["mine"]
    assert sent.getall("X-Twice") == ["1", "2"]
    assert CANARY not in watched.failures[0]


async def test_a_probe_calls_itself_what_servers_know(watched: Watched) -> None:
    async with Workload().served() as workload:
        watched.prober.follow(probed(readiness=http()), workload.machine)
        await watched.until(lambda: bool(workload.asked))

    assert workload.asked[0].headers["User-Agent"].startswith("kube-probe/")


async def test_https_is_asked_without_asking_who_signed(watched: Watched, tmp_path: Path) -> None:
    async with Workload().served(tls=_self_signed(tmp_path)) as workload:
        pod = probed(readiness=http(scheme="HTTPS"))

        await watched.until_health(pod, workload.machine, HEALTHY)


async def test_a_redirect_is_followed_on_the_workload_itself(watched: Watched) -> None:
    async with Workload(status=302, location="/login").served() as workload:
        watched.prober.follow(probed(readiness=http()), workload.machine)

        await watched.until(lambda: bool(watched.failures))

    assert watched.failures == ["Readiness probe failed: stopped after 10 redirects"]
    assert {request.path for request in workload.asked} == {"/", "/login"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["another-port", "another-host"])
async def test_a_redirect_to_anybody_else_passes_and_is_not_followed(watched: Watched, host: str) -> None:
    async with Workload().served() as other:
        target = f"http://{host}:{other.port}/"
        async with Workload(status=307, location=target).served() as workload:
            await watched.until_health(probed(readiness=http()), workload.machine, HEALTHY)

    assert other.asked == []


async def test_a_tcp_probe_passes_where_somebody_listens(watched: Watched) -> None:
    async with Workload(status=0).served() as workload:
        await watched.until_health(probed(readiness=TCP), workload.machine, HEALTHY)


async def test_readiness_and_liveness_wait_for_startup(watched: Watched) -> None:
    async with Workload(status=503).served() as workload:
        pod = probed(
            startup=http(path="/start") | {"failureThreshold": 100_000},
            readiness=http(path="/ready"),
            liveness=http(path="/live"),
        )
        assert watched.prober.follow(pod, workload.machine) == STARTING
        await watched.until(lambda: len(workload.asked) > 5)
        assert {request.path for request in workload.asked} == {"/start"}

        workload.status = 200
        await watched.until_health(pod, workload.machine, HEALTHY)
        begun = len([request for request in workload.asked if request.path == "/start"])
        await watched.until(
            lambda: {request.path for request in workload.asked} == {"/start", "/ready", "/live"}
        )

    assert len([request for request in workload.asked if request.path == "/start"]) == begun


@pytest.mark.parametrize("kind", ["liveness", "startup"])
async def test_a_workload_that_answers_badly_is_dead_once(watched: Watched, kind: str) -> None:
    async with Workload(status=500).served() as workload:
        pod = probed(**{kind: http()}, readiness=http(path="/ready"))
        watched.prober.follow(pod, workload.machine)
        await watched.until(lambda: bool(watched.deaths))
        asked = len(workload.asked)
        watched.prober.follow(pod, workload.machine)
        await asyncio.wait_for(_quiet(workload), DEADLINE_S)

    assert watched.deaths == [f"{kind.title()} probe failed: HTTP probe failed with statuscode: 500"]
    assert len(workload.asked) <= asked + 1  # one may have been under way


async def test_a_refused_connection_is_an_answer(watched: Watched) -> None:
    with _bound() as sock:
        machine = at(f"127.0.0.1:{sock.getsockname()[1]}")
        watched.prober.follow(probed(liveness=TCP), machine)

        await watched.until(lambda: bool(watched.deaths))

    assert watched.deaths == ["Liveness probe failed: connection refused"]


async def test_a_silent_workload_lives_until_its_cloud_is_heard(watched: Watched) -> None:
    async with Workload(status=0).served() as workload:
        pod = probed(liveness=http() | {"timeoutSeconds": 0.02})
        watched.prober.heard()  # before it fell silent
        watched.prober.follow(pod, workload.machine)
        await watched.until(lambda: len(workload.asked) > 10)
        assert watched.deaths == []

        watched.prober.heard()
        await watched.until(lambda: bool(watched.deaths))

    assert watched.deaths == ["Liveness probe failed: no answer within 0.02 s"]


async def test_an_address_that_is_not_known_yet_counts_for_nothing(watched: Watched) -> None:
    pod = probed(liveness=http(), readiness=http())
    nowhere = a_machine(endpoint=None)
    assert watched.prober.follow(pod, nowhere) == UNREADY
    await watched.until(lambda: len(watched.sleeps) > 20)
    assert watched.deaths == watched.failures == []

    async with Workload().served() as workload:  # the same run, and now it has an address
        await watched.until_health(pod, workload.machine, HEALTHY)


async def test_nothing_is_asked_before_the_initial_delay(watched: Watched) -> None:
    async with Workload().served() as workload:
        watched.prober.follow(probed(readiness=http() | {"initialDelaySeconds": 30}), workload.machine)
        await watched.until(lambda: bool(workload.asked))

    assert 25 < watched.sleeps[0] <= 30


def as_told(machine: Machine, *, ready: bool, started: bool = True) -> Obj:
    """The status that an earlier leader wrote of this run."""
    container = {
        "name": "workload",
        "state": {"running": {"startedAt": timestamp(machine.started_at or STARTED)}},
        "containerID": f"fake://{machine.ref.resource_id}",
        "ready": ready,
        "started": started,
        "restartCount": 0,
    }
    return {"phase": "Running", "containerStatuses": [container]}


async def test_a_new_leader_goes_on_where_the_former_one_stood(watched: Watched) -> None:
    async with Workload().served() as workload:
        told = as_told(workload.machine, ready=True)
        pod = probed(startup=http(path="/start"), readiness=http(path="/ready"), status=told)

        assert watched.prober.follow(pod, workload.machine) == HEALTHY
        await watched.until(lambda: len(workload.asked) > 5)

    assert watched.changes == 0
    assert {request.path for request in workload.asked} == {"/ready"}


async def test_what_was_ready_of_an_earlier_run_is_not_ready_of_this_one(watched: Watched) -> None:
    async with Workload(status=503).served() as workload:
        earlier = a_machine(started_at=datetime(2020, 1, 1, tzinfo=UTC))
        pod = probed(readiness=http(), status=as_told(earlier, ready=True))

        assert watched.prober.follow(pod, workload.machine) == UNREADY


async def test_another_run_is_probed_from_its_beginning(watched: Watched) -> None:
    async with Workload(status=500).served() as workload:
        pod = probed(liveness=http())
        watched.prober.follow(pod, workload.machine)
        await watched.until(lambda: len(watched.deaths) == 1)

        again = a_machine(started_at=datetime.now(UTC), ports=workload.machine.ports)
        watched.prober.follow(pod, again)

        await watched.until(lambda: len(watched.deaths) == 2)


async def test_a_pod_that_is_forgotten_is_asked_no_more(watched: Watched) -> None:
    async with Workload().served() as workload:
        pod = probed(readiness=http())
        await watched.until_health(pod, workload.machine, HEALTHY)
        before = watched.changes

        watched.prober.forget(pod["metadata"]["uid"])
        workload.status = 500
        await asyncio.wait_for(_quiet(workload), DEADLINE_S)

    assert watched.changes == before


@pytest.mark.parametrize(
    ("machine", "place"),
    [
        (a_machine(endpoint="10.0.0.1"), Place(host="10.0.0.1", port=80)),
        (a_machine(endpoint="fd00::1"), Place(host="fd00::1", port=80)),
        (a_machine(endpoint="gpu.example.com"), Place(host="gpu.example.com", port=80)),
        (a_machine(endpoint="https://gpu.example.com/x"), Place(host="gpu.example.com", port=80)),
        (a_machine(endpoint=None), None),
        (at("1.2.3.4:31000"), Place(host="1.2.3.4", port=31000)),
        (at("[fd00::1]:31000"), Place(host="fd00::1", port=31000)),
        (
            at("https://x-80.proxy.example.com"),
            Place(host="x-80.proxy.example.com", port=443, base="https://x-80.proxy.example.com"),
        ),
        (at("no port"), None),
        (a_machine(endpoint="10.0.0.1", ports=(PortAddress(port=81, address="10.0.0.1:1"),)), None),
    ],
    ids=["ip", "ipv6", "name", "url", "none", "mapped", "mapped-ipv6", "proxy", "nonsense", "another-port"],
)
def test_a_port_is_where_the_cloud_says(machine: Machine, place: Place | None) -> None:
    assert place_of(machine, 80) == place


async def _quiet(workload: Workload) -> None:
    """Wait until nothing was asked for a while."""
    seen = -1
    while seen != len(workload.asked):
        seen = len(workload.asked)
        await asyncio.sleep(0.1)


def _bound() -> socket.socket:
    """A port that refuses connections."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def _self_signed(folder: Path) -> ssl.SSLContext:
    now = datetime.now(UTC)
    authority = mint_ca(now=now, life=timedelta(hours=1))
    pair = mint_leaf(authority, names=["somebody.example"], now=now, life=timedelta(hours=1))
    file = folder / "pair.pem"
    file.write_bytes(pair.certificate + pair.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    return context


async def test_a_command_passes_by_its_exit_code_and_its_words_are_never_shown(watched: Watched):
    pod = probed(readiness={"exec": {"command": ["code", "0"]}})
    await watched.until_health(pod, at("127.0.0.1:1"), HEALTHY)
    watched.prober.forget(pod["metadata"]["uid"])

    watched.prober.follow(probed(readiness={"exec": {"command": ["code", "3"]}}), at("127.0.0.1:1"))
    await watched.until(lambda: bool(watched.failures))
    assert watched.failures == ["Readiness probe failed: command exited with 3"]


async def test_a_command_that_waits_for_its_turn_has_not_failed(watched: Watched):
    """Its time is counted by whoever runs it: our own queue of calls must not end a workload."""
    pod = probed(liveness={"failureThreshold": 1, "timeoutSeconds": 1, "exec": {"command": ["late", "1.2"]}})
    watched.prober.heard()
    watched.prober.follow(pod, at("127.0.0.1:1"))

    await watched.until(lambda: len(watched.sleeps) > 1)

    assert watched.deaths == []


async def test_a_command_that_could_not_be_run_says_nothing_about_the_workload(watched: Watched):
    pod = probed(liveness={"failureThreshold": 1, "exec": {"command": ["unable"]}})
    watched.prober.heard()
    watched.prober.follow(pod, at("127.0.0.1:1"))

    await watched.until(lambda: len(watched.sleeps) > 5)

    assert watched.deaths == []
