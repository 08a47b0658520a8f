"""Leadership among candidates on a real API server. Each has a clock of its own, moved by hand: nothing here
depends on how long anything takes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from app.api import keys
from app.kube import lease, paths
from app.kube.client import Kube
from app.kube.lease import EPOCH, Election, Term, TermOver
from tests.cluster.kube.waiting import until

DURATION_S, DEADLINE_S = 15.0, 10.0


@dataclass
class Candidate:
    """One replica: its clock, and what its duties saw."""

    election: Election
    clock: list[float]
    terms: list[Term] = field(default_factory=list)
    overdue: list[bool] = field(default_factory=list)
    leading: int = 0
    stubborn: asyncio.Event | None = None  # when set, duties do not stop before it is
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def term(self) -> Term:
        return self.terms[-1]

    def leads(self) -> bool:
        return bool(self.terms) and self.term.valid()

    def passes(self, seconds: float) -> None:
        self.clock[0] += seconds

    async def looks(self, *, times: int = 3) -> None:
        """Wait for the candidate to have looked at the Lease a few times more."""
        seen = self.election.looks
        await until(lambda: self.election.looks >= seen + times)

    async def renews(self) -> None:
        seen = self.election.renewals
        await until(lambda: self.election.renewals > seen + 1)

    async def lead(self, term: Term) -> None:
        self.terms.append(term)
        self.leading += 1
        try:
            await self.finish.wait()
        finally:
            if self.stubborn:
                await self.stubborn.wait()
            self.leading -= 1


@asynccontextmanager
async def standing(kube: Kube, namespace: str, name: str, **options) -> AsyncIterator[Candidate]:
    clock, overdue = [1000.0], []
    election = Election(
        kube,
        namespace=namespace,
        identity=name,
        duration_s=DURATION_S,
        deadline_s=DEADLINE_S,
        renew_s=0.02,
        overdue=lambda: overdue.append(True),
        clock=lambda: clock[0],
        **options,
    )
    candidate = Candidate(election=election, clock=clock, overdue=overdue)
    task = asyncio.create_task(election.run(candidate.lead), name=f"candidate-{name}")
    try:
        yield candidate
    finally:
        if candidate.stubborn:
            candidate.stubborn.set()
        task.cancel()
        await asyncio.wait((task,), timeout=20)
        assert task.done(), "a cancelled candidate goes on"
        if not task.cancelled():
            task.result()


async def held(kube: Kube, namespace: str):
    return await kube.get(paths.lease(namespace, lease.LEASE))


def epoch_on(obj) -> int:
    return int(obj["metadata"]["annotations"][EPOCH])


async def test_the_first_candidate_leads_with_the_first_epoch(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)

        assert a.term.epoch == 1
        spec = (await held(kube, namespace))["spec"]
        assert spec["holderIdentity"] == a.election.identity
        assert spec["leaseDurationSeconds"] == 15
        assert a.election.leader == a.election.identity


async def test_a_second_candidate_waits_while_the_first_renews(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a, standing(kube, namespace, "b") as b:
        await until(lambda: a.leads() or b.leads())
        first, second = (a, b) if a.leads() else (b, a)
        for _ in range(4):
            for one in (first, second):
                one.passes(6.0)  # 24 s in all, but never 15 without a change
            await first.renews()
            await second.looks()

        assert first.leads()
        assert not second.terms
        assert second.election.leader == first.election.identity
        assert len(first.terms) == 1


async def test_a_silent_leader_is_followed_after_its_duration_and_not_before(
    kube: Kube, through, proxy, namespace
):
    async with standing(through, namespace, "a") as a:
        await until(a.leads)
        async with standing(kube, namespace, "b") as b:
            await b.looks()
            await proxy.refuse()
            await b.looks()
            b.passes(DURATION_S - 0.1)
            await b.looks()
            assert not b.terms

            b.passes(0.2)
            await until(b.leads)

            assert b.term.epoch == a.term.epoch + 1
            assert epoch_on(await held(kube, namespace)) == b.term.epoch


async def test_a_leader_is_invalid_at_its_deadline_before_another_may_lead(
    kube: Kube, through, proxy, namespace
):
    async with standing(through, namespace, "a") as a:
        await until(a.leads)
        await proxy.refuse()
        a.passes(DEADLINE_S - 3)
        assert a.term.valid()

        a.passes(3)

        assert not a.term.valid()
        assert a.election.term is None
        await until(lambda: a.leading == 0)
        assert not a.overdue
        assert DEADLINE_S < DURATION_S


async def test_a_paused_leader_finds_its_term_over_in_the_moment_it_goes_on(kube: Kube, namespace):
    """SIGSTOP, or a suspended machine: the clock went on, and no code of ours ran."""
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)
        term = a.term

        a.passes(60.0)
        assert not term.valid()  # nothing was awaited since: no task had a chance to tell it

        await until(lambda: len(a.terms) == 2)
        assert not term.valid()
        assert a.term.epoch == term.epoch + 1
        with pytest.raises(TermOver):
            await term.raise_epoch(99)


async def test_duties_are_cancelled_while_there_is_still_time_to_stop(kube: Kube, through, proxy, namespace):
    async with standing(through, namespace, "a", stop_s=2.0) as a:
        await until(a.leads)
        await proxy.refuse()
        a.passes(DEADLINE_S - 1.9)

        await until(lambda: a.leading == 0)

        assert not a.term.valid()
        assert not a.overdue


async def test_duties_that_do_not_stop_are_reported_once_and_never_joined_by_new_ones(kube: Kube, namespace):
    async with standing(kube, namespace, "a", stop_s=0.05) as a:
        await until(a.leads)
        async with standing(kube, namespace, "b") as b:  # its looks tell that time goes on
            a.stubborn = asyncio.Event()
            a.passes(60.0)
            await until(lambda: a.overdue == [True])
            looks = a.election.looks
            await b.looks(times=10)

            assert a.leading == 1
            assert a.election.looks == looks  # not even a candidate
            assert a.overdue == [True]

        a.stubborn.set()
        await until(lambda: len(a.terms) == 2)
        assert a.overdue == [True]


async def test_a_shutdown_while_duties_are_stopping_is_not_forgotten(kube: Kube, namespace):
    async with standing(kube, namespace, "a", stop_s=0.05) as a:
        await until(a.leads)
        a.stubborn = asyncio.Event()
        a.passes(60.0)
        await until(lambda: a.overdue == [True])  # lost, and waiting for the duties
        (task,) = (each for each in asyncio.all_tasks() if each.get_name() == "candidate-a")
        task.cancel()
        await asyncio.wait((task,), timeout=0)
        assert not task.done()  # the duties still run

        a.stubborn.set()
        await asyncio.wait((task,), timeout=20)

        assert task.cancelled()
        assert len(a.terms) == 1


async def test_an_api_server_that_comes_back_in_time_costs_nothing(kube: Kube, through, proxy, namespace):
    async with standing(through, namespace, "a") as a:
        await until(a.leads)
        await proxy.refuse()
        a.passes(DEADLINE_S - 4)
        proxy.flow()
        await a.renews()
        a.passes(DEADLINE_S - 4)
        await a.renews()

        assert a.leads()
        assert len(a.terms) == 1


async def test_a_released_lease_is_taken_at_once(kube: Kube, namespace):
    async with standing(kube, namespace, "b") as b:
        await until(b.leads)
        b.finish.set()  # its duties end by themselves
        await until(lambda: b.leading == 0)
        released = await held_by_nobody(kube, namespace)
        assert epoch_on(released) == 1

        async with standing(kube, namespace, "c") as c:
            await until(c.leads)  # c's clock has not moved
            assert c.term.epoch == 2


async def held_by_nobody(kube: Kube, namespace: str):
    async def free() -> bool:
        return not (await held(kube, namespace))["spec"].get("holderIdentity")

    await until(free)
    return await held(kube, namespace)


async def test_shutting_down_ends_the_duties_and_then_releases(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)

    assert a.leading == 0
    assert not a.term.valid()
    assert (await held(kube, namespace))["spec"].get("holderIdentity") in (None, "")


@pytest.mark.field_case("FC-045")
async def test_a_failure_of_the_duties_releases_and_is_raised(kube: Kube, namespace):
    election = Election(kube, namespace=namespace, identity="a", renew_s=0.02)

    async def lead(term: Term) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await election.run(lead)

    assert (await held(kube, namespace))["spec"].get("holderIdentity") in (None, "")


async def test_a_lease_that_was_written_meanwhile_is_released_all_the_same(kube: Kube, namespace):
    """As after a renewal that was cut off by the end: written, and its new version never heard of."""
    election = Election(kube, namespace=namespace, identity="a")

    async def lead(term: Term) -> None:
        path = paths.lease(namespace, keys.LEASE_NAME)
        await kube.patch(path, {"metadata": {"labels": {"seen": "by-a-person"}}}, kind="merge")

    await election.run(lead)

    assert (await held(kube, namespace))["spec"].get("holderIdentity") in (None, "")


async def test_a_raised_epoch_is_on_the_lease_and_below_every_later_one(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)

        assert await a.term.raise_epoch(41) == 41
        assert await a.term.raise_epoch(7) == 41
        assert a.term.epoch == 41
        assert epoch_on(await held(kube, namespace)) == 41
        await a.renews()
        assert epoch_on(await held(kube, namespace)) == 41
        assert a.leads()

    async with standing(kube, namespace, "b") as b:
        await until(b.leads)
        assert b.term.epoch == 42


async def test_a_raised_epoch_whose_answer_was_lost_can_be_asked_for_again(
    kube: Kube, through, proxy, namespace
):
    async with standing(through, namespace, "a") as a:
        await until(a.leads)

        async def raised() -> bool:
            proxy.swallow_next_answer()
            try:
                return await a.term.raise_epoch(50) == 50
            except lease.KubeError:
                proxy.flow()
                return await a.term.raise_epoch(50) == 50

        await until(raised)
        proxy.flow()
        await a.renews()

        assert proxy.swallowed
        assert len(a.terms) == 1
        assert a.leads()
        assert epoch_on(await held(kube, namespace)) == a.term.epoch == 50


async def test_a_renewal_whose_answer_was_lost_does_not_end_the_term(kube: Kube, through, proxy, namespace):
    async with standing(through, namespace, "a") as a:
        await until(a.leads)
        proxy.swallow_next_answer()
        await until(lambda: proxy.swallowed == 1)
        await a.renews()

        assert a.leads()
        assert len(a.terms) == 1
        assert epoch_on(await held(kube, namespace)) == 1


async def test_a_label_on_the_lease_does_not_end_the_term_and_stays(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)
        labels = {"metadata": {"labels": {"team": "gpu"}}}
        await kube.patch(paths.lease(namespace, lease.LEASE), labels, kind="merge")
        await a.renews()

        assert len(a.terms) == 1
        assert a.leads()
        assert (await held(kube, namespace))["metadata"]["labels"] == {"team": "gpu"}


async def test_a_lease_taken_by_hand_ends_the_term_at_once(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)
        rival = {"spec": {"holderIdentity": "somebody"}}
        await kube.patch(paths.lease(namespace, lease.LEASE), rival, kind="merge")

        await until(lambda: a.leading == 0)

        assert not a.term.valid()
        await a.looks()
        assert len(a.terms) == 1  # and it waits its turn


async def test_a_deleted_lease_ends_the_term_and_its_epoch_does_not_fall(kube: Kube, namespace):
    async with standing(kube, namespace, "a") as a:
        await until(a.leads)
        await a.term.raise_epoch(9)
        first = a.term
        await kube.delete(paths.lease(namespace, lease.LEASE))

        await until(lambda: len(a.terms) == 2)

        assert not first.valid()
        assert a.term.epoch == 10
        assert epoch_on(await held(kube, namespace)) == 10


async def test_a_candidate_that_knew_a_leader_waits_when_the_lease_vanishes(
    kube: Kube, through, proxy, namespace
):
    """The leader may not have noticed yet."""
    async with standing(through, namespace, "a") as a:
        await until(a.leads)
        async with standing(kube, namespace, "b") as b:
            await b.looks()
            await proxy.refuse()
            await b.looks()
            await kube.delete(paths.lease(namespace, lease.LEASE))
            await b.looks()
            assert a.term.valid()
            assert not b.terms

            b.passes(DURATION_S)
            await until(b.leads)
            assert b.term.epoch == 2


async def test_an_epoch_that_is_no_number_is_survived(kube: Kube, namespace):
    broken = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease.LEASE, "annotations": {EPOCH: "many"}},
    }
    await kube.create(paths.leases(namespace), broken)

    async with standing(kube, namespace, "a") as a:
        await until(a.leads)
        assert a.term.epoch == 1


async def test_of_many_candidates_one_leads_at_a_time_and_no_epoch_is_used_twice(kube: Kube, namespace):
    async with AsyncExitStack() as stack:
        everyone = [await stack.enter_async_context(standing(kube, namespace, f"c{n}")) for n in range(4)]
        for rounds in range(1, 6):
            await until(lambda: any(each.leads() for each in everyone))
            (leader,) = (each for each in everyone if each.leads())
            epochs = [term.epoch for each in everyone for term in each.terms]
            assert len(set(epochs)) == len(epochs) >= rounds
            assert leader.term.epoch == max(epochs)

            for each in everyone:
                await each.looks() if each is not leader else None
            leader.passes(60.0)  # it was paused
            for each in everyone:
                if each is not leader:
                    each.passes(DURATION_S + 1)


def test_the_clock_goes_on_while_the_machine_sleeps():
    assert lease.boot_clock() >= lease.time.monotonic() - 1
    assert lease.Election.__init__.__kwdefaults__["clock"] is lease.boot_clock


@pytest.mark.parametrize(
    "bad",
    [
        {"renew_s": 10.0, "deadline_s": 10.0},
        {"deadline_s": 15.0, "duration_s": 15.0},
        {"stop_s": 10.0, "deadline_s": 10.0},
        {"stop_s": 0.0},
    ],
)
async def test_times_that_would_allow_two_leaders_are_refused(kube: Kube, bad):
    with pytest.raises(ValueError, match=r"Lease|duties"):
        Election(kube, namespace="default", identity="a", **bad)
