"""The durations that users get, with a clock that is moved by hand: through rounds, settling and release.

All other tests live by the fast profile. Postgres has a clock of its own; it is moved by moving what it has
written down.
"""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from app.inventory.accounts import Account
from app.kube import paths
from app.provisioning.model import Releasing, Rented, Waiting, Why
from app.settings import FAST, Settings
from tests.cluster.provisioning.conftest import POLICY, WORKLOAD, Bench
from tests.support.clouds import SMALL

DEFAULTS: dict[str, Any] = {name: Settings.model_fields[name].default for name in FAST}
# These are waited for in real time: here rounds come when the test wants them.
DEFAULTS |= {"list_busy_s": 3600.0, "list_rest_s": 3600.0}
SETTLE_S, WINDOW_S = 180.0, 30.0
MARGIN_S = 5.0  # more than the test itself takes between two looks

pytestmark = pytest.mark.slow


class Clock:
    """Monotonic seconds; rows and the marks on claims grow old with it."""

    def __init__(self, bench: Bench) -> None:
        self.now, self._bench = 1000.0, bench

    def __call__(self) -> float:
        return self.now

    async def move(self, seconds: float) -> None:
        by = {"by": timedelta(seconds=seconds)}
        async with self._bench.engine.begin() as conn:
            await conn.execute(
                text(
                    "update provision_attempt set send_by = send_by - cast(:by as interval),"
                    " created_at = created_at - cast(:by as interval)"
                ),
                by,
            )
            await conn.execute(text("update run set accepted_at = accepted_at - cast(:by as interval)"), by)
            uids = {str(row.uid) for row in await conn.execute(text("select claim_uid as uid from rental"))}
        kube = self._bench.kube
        async for page in kube.list_pages(paths.nodeclaims()):
            for claim in page["items"]:
                mark = (claim.get("status") or {}).get("attempt")
                if mark is not None and claim["metadata"]["uid"] in uids:
                    send_by = datetime.fromisoformat(mark["sendBy"]) - timedelta(seconds=seconds)
                    body = {"status": {"attempt": {"sendBy": send_by.isoformat()}}}
                    await kube.patch(paths.nodeclaim_status(claim["metadata"]["name"]), body, kind="merge")
        for life in self._bench.provisioning._core.lives.values():
            life.looked = None  # it remembers the mark as it was, which nothing but this clock ever moves
        self.now += seconds

    async def rounds(self, account: Account, count: int = 2) -> None:
        """Whole lists, each begun at a moment of its own."""
        for _ in range(count):
            self.now += 0.001
            await self._bench.provisioning.inventory.poll_once(account)


@pytest.fixture
def scenario() -> dict[str, Any]:
    return {**SMALL, "settle_after_s": SETTLE_S}


async def test_an_unanswered_create_is_called_absent_after_window_time_out_and_settling_and_not_before(
    bench: Bench,
):
    clock = Clock(bench)
    async with bench.running(clock=clock, **DEFAULTS):
        (account,) = bench.accounts
        assert (account.settle_after_s, bench.provisioning.inventory.now()) == (SETTLE_S, 1000.0)
        await bench.cloud.add_fault("status", verb="create", status=500)
        claim = await bench.claim()
        waits = [first.after_s] if isinstance(first := await bench.ensure_once(claim), Waiting) else []

        last_s = WINDOW_S + account.provision_timeout_s + SETTLE_S
        for move_s in (20.0, last_s - 20.0 - MARGIN_S):
            await clock.move(move_s)
            await clock.rounds(account)
            outcome = await bench.ensure_once(claim)
            assert isinstance(outcome, Waiting)
            assert outcome.why is Why.UNKNOWN
            waits.append(outcome.after_s)
        assert (await bench.row("select outcome from provision_attempt")).outcome is None
        assert waits == [1.0, 2.0, 4.0]  # the back-off begins at a second and doubles

        await clock.move(2 * MARGIN_S)
        assert isinstance(await bench.ensure_once(claim), Waiting)  # no list has begun since
        await clock.rounds(account, 1)
        assert isinstance(await bench.ensure_once(claim), Waiting)  # nor a second one: a list may leave out
        await clock.rounds(account, 1)
        assert isinstance(await bench.ensure_once(claim), Rented)
        outcomes = [
            row.outcome for row in await bench.rows("select outcome from provision_attempt order by number")
        ]
        assert outcomes == ["absent", "accepted"]


async def test_a_machine_that_was_never_seen_is_gone_after_settling_and_one_that_was_seen_at_once(
    bench: Bench,
):
    clock = Clock(bench)
    async with bench.running(clock=clock, **DEFAULTS):
        (account,) = bench.accounts
        await bench.cloud.add_fault("phantom", verb="create")
        phantom, seen = await bench.claim(), await bench.claim()
        await bench.rented(phantom)
        await bench.rented(seen)
        await clock.rounds(account)
        assert bench.provisioning.view(seen.uid).machine is not None

        assert isinstance(await bench.release_once(phantom), Releasing)
        assert isinstance(await bench.release_once(seen), Releasing)
        await clock.rounds(account)
        await bench.release(seen)
        await clock.move(SETTLE_S - MARGIN_S)
        await clock.rounds(account)
        assert isinstance(await bench.release_once(phantom), Releasing)

        await clock.move(2 * MARGIN_S)
        assert isinstance(await bench.release_once(phantom), Releasing)
        await clock.rounds(account)
        await bench.release(phantom)
        assert await bench.cloud.alive() == []


async def test_a_leader_that_took_longer_than_the_window_does_not_send(bench: Bench):
    clock = Clock(bench)
    async with bench.running(clock=clock, **DEFAULTS):
        claim = await bench.claim()
        door, mark = bench.door, type(bench.door).mark

        class Slow(type(door)):  # type: ignore[misc]
            async def mark(self, *args: Any, **named: Any) -> None:
                await mark(door, *args, **named)
                clock.now += WINDOW_S

        outcome = await bench.provisioning.ensure(
            claim, WORKLOAD, port=Slow(bench.kube.room("test")), policy=POLICY
        )

        assert isinstance(outcome, Waiting)
        assert await bench.cloud.creates() == {}
        assert (await bench.row("select outcome from provision_attempt")).outcome == "unsent"
