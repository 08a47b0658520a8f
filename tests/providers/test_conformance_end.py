"""How machines end: asked for or not, and what the cloud then tells."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from providers.base import (
    Completion,
    EndReason,
    Machine,
    MachineState,
    Ref,
    ResourceId,
    Terminated,
    Throttled,
    Tier,
    Unavailable,
)
from providers.capabilities import Restarts
from tests.providers.conftest import Pair, a_workload
from tests.providers.rows import having

NewPair = Callable[..., Awaitable[Pair]]


async def _got(pair: Pair, ref: Ref) -> Machine:
    machine = await pair.provider.get(ref)
    assert machine is not None
    return machine


async def test_a_terminated_machine_is_gone_from_list_and_get(new_pair: NewPair):
    pair = await new_pair(history_s=0)
    accepted = await pair.rented()

    answer = await pair.provider.terminate(accepted.ref)

    assert answer is Terminated.ACCEPTED
    assert await pair.provider.get(accepted.ref) is None
    assert (await pair.round()).machines == ()
    assert await pair.cloud.alive() == []


@pytest.mark.field_case("FC-082")
async def test_terminate_may_be_repeated(pair: Pair):
    accepted = await pair.rented()

    await pair.provider.terminate(accepted.ref)
    again = await pair.provider.terminate(accepted.ref)

    assert again in (Terminated.ACCEPTED, Terminated.NOT_FOUND)


@pytest.mark.field_case("FC-022")
async def test_terminate_of_an_unknown_id_is_not_found(pair: Pair):
    unknown = Ref(
        provider=pair.row.name, account="default", region=pair.region, resource_id=ResourceId("no-such")
    )

    assert await pair.provider.terminate(unknown) is Terminated.NOT_FOUND


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        ({"kind": "lost"}, True),
        ({"kind": "lost", "when": "before"}, False),
        ({"kind": "status", "status": 500, "when": "after"}, True),
        ({"kind": "status", "status": 404}, False),
        ({"kind": "status", "status": 409}, False),
    ],
    ids=["lost-after", "lost-before", "500-after", "bare-404", "409"],
)
@pytest.mark.field_case("FC-022")
async def test_a_terminate_without_a_usable_answer_is_asked_again(
    pair: Pair, fault: dict[str, Any], ended: bool
):
    attempt = pair.attempt()
    accepted = await pair.rented(attempt)
    await pair.cloud.add_fault(verb="terminate", unlimited=True, **fault)

    with pytest.raises(Unavailable):
        await pair.provider.terminate(accepted.ref)

    (machine,) = await pair.at_cloud(attempt.identity)
    assert (machine["state"] == "gone") is ended


async def test_a_throttled_terminate_is_asked_again(pair: Pair):
    accepted = await pair.rented()
    await pair.cloud.add_fault("throttle", verb="terminate")

    with pytest.raises(Throttled):
        await pair.provider.terminate(accepted.ref)

    assert await pair.provider.terminate(accepted.ref) is Terminated.ACCEPTED


async def test_a_machine_on_its_way_out_still_exists(new_pair: NewPair):
    pair = await new_pair(life={"boot_s": 0, "end_s": 3600})
    attempt = pair.attempt()
    accepted = await pair.rented(attempt)

    await pair.provider.terminate(accepted.ref)

    (machine,) = await pair.found(attempt.identity)
    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert machine.end.reason is EndReason.TERMINATED


async def test_a_gone_machine_in_the_history_does_not_exist(new_pair: NewPair):
    pair = await new_pair(history_s=3600)
    accepted = await pair.rented()

    await pair.provider.terminate(accepted.ref)

    machine = await _got(pair, accepted.ref)
    assert machine.state is MachineState.GONE
    assert not machine.exists
    assert machine.meters == ()


@pytest.mark.parametrize("row", having("code"), ids=str)
@pytest.mark.parametrize(("code", "reason"), [(0, EndReason.COMPLETED), (3, EndReason.FAILED)])
async def test_a_workload_that_ends_shows_its_code(pair: Pair, code: int, reason: EndReason):
    accepted = await pair.rented()

    await pair.cloud.exit(accepted.ref.resource_id, code=code)

    machine = await _got(pair, accepted.ref)
    assert pair.provider.traits.completion is Completion.CODE
    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert (machine.end.reason, machine.end.exit_code) == (reason, code)
    assert machine.end.at is not None
    assert machine.end.at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("row", having("ends"), ids=str)
async def test_a_code_that_the_cloud_does_not_tell_is_none(new_pair: NewPair):
    pair = await new_pair(completion="ended")
    accepted = await pair.rented()

    await pair.cloud.exit(accepted.ref.resource_id, code=0)

    machine = await _got(pair, accepted.ref)
    assert machine.end is not None
    assert machine.end.exit_code is None


async def test_a_cloud_that_shows_no_end_shows_a_running_machine(new_pair: NewPair):
    pair = await new_pair(completion="never")
    accepted = await pair.rented()

    await pair.cloud.exit(accepted.ref.resource_id, code=0)

    machine = await _got(pair, accepted.ref)
    assert pair.provider.traits.completion is Completion.NEVER
    assert (machine.state, machine.end) == (MachineState.RUNNING, None)


@pytest.mark.parametrize("row", having("spot"), ids=str)
async def test_a_reclaimed_machine_was_preempted(pair: Pair):
    accepted = await pair.rented(pair.attempt(tier=Tier.SPOT))

    await pair.cloud.preempt(accepted.ref.resource_id)

    machine = await _got(pair, accepted.ref)
    assert machine.end is not None
    assert (machine.end.reason, machine.end.exit_code) == (EndReason.PREEMPTED, None)


@pytest.mark.parametrize("how", ["broke", "ended", "removed"])
async def test_fx_05_ending_what_is_over_already_is_done_and_no_error(pair: Pair, how: str):
    accepted = await pair.rented()
    machine = accepted.ref.resource_id
    await {
        "broke": lambda: pair.cloud.fail(machine),
        "ended": lambda: pair.cloud.exit(machine, code=0),
        "removed": lambda: pair.cloud.remove(machine),
    }[how]()

    for _ in range(2):
        assert await pair.provider.terminate(accepted.ref) in (Terminated.ACCEPTED, Terminated.NOT_FOUND)
    assert machine not in {one["id"] for one in await pair.cloud.alive()}


async def test_a_machine_that_broke_failed_without_a_code(pair: Pair):
    accepted = await pair.rented()

    await pair.cloud.fail(accepted.ref.resource_id, message="the disk broke")

    machine = await _got(pair, accepted.ref)
    assert machine.end is not None
    assert (machine.end.reason, machine.end.exit_code) == (EndReason.FAILED, None)
    assert machine.end.message == "the disk broke"


@pytest.mark.parametrize("row", having("lifetime"), ids=str)
@pytest.mark.field_case("FC-082")
async def test_the_longest_life_ends_a_machine_as_lifetime(new_pair: NewPair):
    pair = await new_pair(life={"boot_s": 0, "max_s": 1}, history_s=3600, clock={"scale": 20})
    accepted = await pair.rented()

    await pair.cloud.until(lambda truth: truth["machines"][0]["state"] == "gone", what="the end")

    machine = await _got(pair, accepted.ref)
    assert pair.provider.traits.max_lifetime_s == 1
    assert machine.end is not None
    assert machine.end.reason is EndReason.LIFETIME


@pytest.mark.parametrize("row", having("stop"), ids=str)
async def test_stop_ends_the_workload_and_leaves_the_machine_to_terminate(pair: Pair):
    accepted = await pair.rented()

    await pair.provider.stop(accepted.ref, grace_s=0)
    await pair.provider.stop(accepted.ref, grace_s=0)

    machine = await _got(pair, accepted.ref)
    assert machine.state is MachineState.EXITED
    assert machine.end is not None
    assert machine.end.reason is EndReason.TERMINATED
    assert machine.end.exit_code in (143, 137)  # a grace of nothing may be over before it has heard


@pytest.mark.parametrize("row", having("grace"), ids=str)
async def test_a_workload_that_will_not_stop_is_killed_at_the_end_of_its_grace(new_pair: NewPair):
    pair = await new_pair(life={"boot_s": 0, "stop_s": 3600})
    accepted = await pair.rented()

    await pair.provider.stop(accepted.ref, grace_s=3000)
    assert (await _got(pair, accepted.ref)).state is MachineState.RUNNING
    await pair.provider.stop(accepted.ref, grace_s=0)

    machine = await _got(pair, accepted.ref)
    assert machine.end is not None
    assert machine.end.exit_code == 137


@pytest.mark.parametrize("row", having("restarts"), ids=str)
async def test_a_restart_runs_the_workload_again_on_the_same_machine_at_the_same_price(pair: Pair):
    restarting = _restarting(pair)
    accepted = await pair.rented()
    before = await _got(pair, accepted.ref)
    await pair.cloud.exit(accepted.ref.resource_id, code=3)

    assert await restarting.restart(accepted.ref)

    machine = await _got(pair, accepted.ref)
    assert (machine.state, machine.end, machine.meters) == (MachineState.RUNNING, None, before.meters)
    assert machine.started_at is not None
    assert before.started_at is not None
    assert machine.started_at > before.started_at


@pytest.mark.parametrize("row", having("restarts"), ids=str)
async def test_a_running_workload_can_be_restarted_too(pair: Pair):
    restarting = _restarting(pair)
    accepted = await pair.rented()

    assert await restarting.restart(accepted.ref)

    (truth,) = [one for one in await pair.cloud.machines() if one["id"] == accepted.ref.resource_id]
    assert (truth["state"], truth["restarts"]) == ("running", 1)


@pytest.mark.parametrize("row", having("restarts"), ids=str)
async def test_a_machine_that_is_gone_or_was_taken_back_is_not_restarted(new_pair: NewPair):
    pair = await new_pair(history_s=0)
    restarting = _restarting(pair)
    gone = await pair.rented()
    taken = await pair.rented(pair.attempt(tier=pair.row.tier))
    await pair.provider.terminate(gone.ref)
    await pair.cloud.preempt(taken.ref.resource_id)

    assert not await restarting.restart(gone.ref)
    assert not await restarting.restart(taken.ref)


@pytest.mark.parametrize("row", having("no-restarts"), ids=str)
async def test_a_cloud_without_restarts_does_not_offer_them(new_pair: NewPair):
    pair = await new_pair(restarts=False)

    assert not isinstance(pair.provider, Restarts)


def _restarting(pair: Pair) -> Restarts:
    assert isinstance(pair.provider, Restarts)
    return pair.provider


@pytest.mark.field_case("FC-082")
async def test_stop_of_a_machine_that_is_gone_is_a_success(new_pair: NewPair):
    pair = await new_pair(history_s=0)
    accepted = await pair.rented()
    await pair.provider.terminate(accepted.ref)

    await pair.provider.stop(accepted.ref, grace_s=0)

    assert await pair.provider.get(accepted.ref) is None


@pytest.mark.parametrize("row", having("code"), ids=str)
async def test_a_scripted_workload_ends_as_its_environment_says(new_pair: NewPair):
    pair = await new_pair()

    accepted = await pair.rented(workload=a_workload(env={"FAKE_EXIT_AFTER_S": "0", "FAKE_EXIT_CODE": "5"}))

    machine = await _got(pair, accepted.ref)
    assert machine.end is not None
    assert machine.end.exit_code == 5


async def test_a_machine_boots_before_it_runs(new_pair: NewPair):
    pair = await new_pair(life={"boot_s": 3600})
    accepted = await pair.rented()

    machine = await _got(pair, accepted.ref)

    assert machine.state is MachineState.BOOTING
    assert (machine.started_at, machine.endpoint) == (None, None)
