"""Schedules told by hand: those that are too narrow for chance, each for the clause that closes it.

A story moves one call after another, up to a place, and lets time pass. Where a clause is kept, a call may
end earlier than the story thinks; the story then goes on with the others.
"""

import random
from collections.abc import Callable, Iterable

from tests.model.base import Steps
from tests.model.clauses import Clause
from tests.model.controller import Controller
from tests.model.world import (
    END_LAG,
    LEASE,
    REPLAY_FOR,
    SETTLE,
    TIMEOUT,
    WINDOW,
    Broken,
    Claim,
    Faults,
    Machine,
    World,
)

Told = Callable[[], bool]


class Stage:
    """One claim, two controllers, and no chance: whatever goes wrong is done by the story."""

    def __init__(self, without: Iterable[Clause], *, tokens: bool = False) -> None:
        self.world = World(random.Random(0), Faults(tokens=tokens))
        self.claim = self.world.claims[1] = Claim(1)
        dropped = frozenset(without)
        self.a, self.b = (Controller(name, self.world, without=dropped) for name in "AB")
        self.pass_time(1)
        self.lead(self.a)
        self.world.backup()

    def lead(self, controller: Controller) -> None:
        """It takes the Lease, once that is free, and settles its epoch."""
        while controller.epoch is None:
            duty = controller.lead()
            while next(duty) <= self.world.now:
                pass
            if controller.epoch is None:
                self.world.tick()

    def renew(self) -> None:
        """The leader goes on leading."""
        holder, _, epoch = self.world.lease
        self.world.lease = (holder, self.world.now, epoch)
        for one in (self.a, self.b):
            if one.name == holder:
                one.lease_until = self.world.now + LEASE

    def pass_time(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick()

    def list_twice(self, controller: Controller) -> None:
        """Two complete lists, from now on."""
        for _ in range(2):
            self.world.tick()
            self.renew()
            duty = controller.poll()
            while next(duty) <= self.world.now:
                pass

    def to(self, call: Steps[object], there: Told) -> None:
        """Move a call on until it is there, or over."""
        for _ in range(200):
            if there():
                return
            try:
                due = next(call)
            except StopIteration:
                return
            while self.world.now < due:
                self.world.tick()

    def end(self, call: Steps[object]) -> None:
        self.to(call, lambda: False)

    def asks(self, call: Steps[object], times: int) -> None:
        """Move a call over so many of its transactions."""
        wanted = self.world.asked + times
        self.to(call, lambda: self.world.asked >= wanted)

    def marked(self, call: Steps[object], sequence: int = 1) -> None:
        self.to(call, lambda: self.claim.mark is not None and self.claim.mark[0] >= sequence)

    def looked(self, call: Steps[object]) -> None:
        wanted = self.world.looks + 1
        self.to(call, lambda: self.world.looks >= wanted)

    def release(self, controller: Controller) -> Steps[None]:
        """A release whose word is taken: the claim counts as released when it says so."""
        if (yield from controller.release(1)):
            self.claim.released = True

    def lose_answer(self, *, effect: bool, late: bool = False) -> None:
        """The next creates are sent, and their answers are lost. ``late``: effect and sight come at last."""
        self.world.faults.lost, self.world.faults.late = 1.0, float(late)
        self.world.below = lambda limit: limit - 1  # type: ignore[method-assign]
        self.world.chance = lambda odds: odds == 1.0 or (odds == 0.7 and effect)  # type: ignore[method-assign]

    def answer(self) -> None:
        self.world.faults.lost = self.world.faults.late = 0.0
        self.world.chance = lambda _odds: False  # type: ignore[method-assign]

    def list_once(self, controller: Controller, *, without: bool = False) -> None:
        """One complete list, asked for now; ``without``: it leaves out what it may."""
        if without:
            self.world.faults.flap = 1.0
            self.world.chance = lambda odds: odds == 1.0  # type: ignore[method-assign]
        duty = controller.poll()
        while next(duty) <= self.world.now:
            pass
        self.world.faults.flap = 0.0
        self.answer()

    def until(self, tick: int) -> None:
        """The leader leads on until then."""
        while self.world.now < tick:
            self.world.tick()
            self.renew()

    def hide(self) -> Machine:
        """The newest machine is shown to nobody for as long as that may be."""
        machine = self.world.machines[max(self.world.machines)]
        machine.lists_at = machine.gets_at = machine.made_at + SETTLE
        return machine

    def leave_out(self, machine: Machine, ticks: int) -> None:
        """Lists do not show it for a while, though gets do: longer than a cloud may, by its contract."""
        machine.lists_at = self.world.now + ticks


def a_release_looks_before_a_sender_marks(stage: Stage) -> None:
    """Its Pod is over while a sender is under way: the claim has no mark yet when release looks."""
    rent, back = stage.a.ensure(1), stage.release(stage.a)
    stage.asks(rent, 2)  # rows, intent
    stage.claim.finished = True
    stage.looked(back)
    stage.marked(rent)
    stage.asks(rent, 1)  # the fence
    stage.end(back)
    stage.end(rent)


def the_store_is_restored_under_a_release(stage: Stage) -> None:
    """It has committed ending, and looked; then the rows are those of before, and a sender goes on."""
    rent, back = stage.a.ensure(1), stage.release(stage.a)
    stage.asks(rent, 1)
    next(rent)
    stage.claim.finished = True
    stage.looked(back)
    stage.asks(back, 1)
    next(back)  # the answer has come
    stage.world.restore()
    stage.marked(rent)
    stage.asks(rent, 1)
    stage.end(back)
    stage.end(rent)


def an_attempt_is_sent_again_under_a_release(stage: Stage) -> None:
    """A call that found the rental open wakes up while a release, which has read the rows, stands still."""
    _lost(stage, effect=False)
    again, back = stage.a.ensure(1), stage.release(stage.a)
    stage.looked(again)
    next(again)
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    stage.asks(back, 3)  # ending, rows, and rows again
    _pass(stage, WINDOW + TIMEOUT)
    stage.lose_answer(effect=True)
    stage.end(again)
    stage.answer()
    _hidden_until_released(stage, back)


def an_attempt_is_sent_again_and_released(stage: Stage) -> None:
    """The second send was made late, and counts from then."""
    _lost(stage, effect=False)
    _pass(stage, WINDOW + TIMEOUT)
    stage.lose_answer(effect=True)
    stage.end(stage.a.ensure(1))
    stage.answer()
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    _hidden_until_released(stage, stage.release(stage.a))


def a_former_leader_settles_what_its_successor_sends_again(stage: Stage) -> None:
    """It saw two lists without the machine, and says so after the next leader's replay has made it."""
    _lost(stage, effect=False)
    old = stage.a.ensure(1)
    _settle(stage, stage.a)
    stage.a.life(1).look_from = 0
    stage.looked(old)
    next(old)
    stage.pass_time(LEASE + 1)
    stage.lead(stage.b)
    stage.lose_answer(effect=True)
    stage.end(stage.b.ensure(1))
    stage.hide()
    stage.answer()
    stage.end(old)
    stage.renew()
    stage.end(stage.b.ensure(1))
    stage.end(stage.b.ensure(1))


def a_former_leader_marks_over_its_successor(stage: Stage) -> None:
    """It stood still between its intent and its mark; a restore gave its number to its successor, and another
    one leaves only the mark, whose send_by is the former leader's, long past."""
    old = stage.a.ensure(1)
    stage.asks(old, 2)
    next(old)
    stage.pass_time(LEASE + 1)
    stage.world.restore()
    stage.lead(stage.b)
    stage.lose_answer(effect=True)
    stage.end(stage.b.ensure(1))
    stage.hide()
    stage.answer()
    stage.end(old)
    stage.world.restore()
    stage.b.epoch = None
    stage.renew()
    stage.lead(stage.b)
    stage.end(stage.b.ensure(1))
    stage.list_twice(stage.b)
    stage.end(stage.b.ensure(1))
    stage.end(stage.b.ensure(1))


def a_sender_stands_still_after_its_rows_were_read(stage: Stage) -> None:
    """The fence's rows were fine; then send_by passed, and the claim was released."""
    rent = stage.a.ensure(1)
    stage.marked(rent)
    stage.asks(rent, 1)
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    _settle(stage, stage.a)
    stage.end(stage.release(stage.a))
    stage.end(rent)


def a_second_call_judges_by_a_mark_that_it_read_before(stage: Stage) -> None:
    """It read no mark, and calls the first call's attempt unsent, which is sent meanwhile."""
    first, second = stage.a.ensure(1), stage.a.ensure(1)
    stage.asks(first, 2)
    stage.looked(second)
    stage.lose_answer(effect=True)
    stage.end(first)
    stage.hide()
    stage.answer()
    stage.end(second)
    stage.end(stage.a.ensure(1))
    stage.end(stage.a.ensure(1))


def a_fresh_machine_is_shown_to_nobody(stage: Stage) -> None:
    """Its create was answered; lists and gets do not know it yet when its claim is released."""
    rent = stage.a.ensure(1)
    stage.to(rent, lambda: bool(stage.world.machines))
    stage.hide()
    stage.end(rent)
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    stage.list_twice(stage.a)
    stage.end(stage.release(stage.a))
    _gone_if_released(stage)
    _settle(stage, stage.a)
    for _ in range(4):
        stage.end(stage.release(stage.a))
        stage.list_twice(stage.a)
    _gone_if_released(stage, must=True)


def a_lost_machine_is_shown_late(stage: Stage) -> None:
    """Two lists without it, made while it may still be on its way into them."""
    _lost(stage, effect=True)
    stage.hide()
    stage.end(stage.a.ensure(1))
    stage.list_twice(stage.a)
    stage.end(stage.a.ensure(1))
    stage.end(stage.a.ensure(1))


def a_late_machine_is_left_out_once(stage: Stage) -> None:
    """It is sent, made and shown as late as may be: the earlier of two lists is too early for it, and the
    later one leaves it out, as a list may, once."""
    rent = stage.a.ensure(1)
    stage.marked(rent)
    stage.asks(rent, 1)
    assert stage.claim.mark is not None
    send_by = stage.claim.mark[1]
    stage.until(send_by - 1)
    stage.lose_answer(effect=True, late=True)
    stage.end(rent)
    stage.until(send_by - 1 + TIMEOUT)
    stage.answer()
    stage.end(stage.a.ensure(1))
    stage.until(send_by + TIMEOUT + SETTLE - 2)
    stage.list_once(stage.a)
    stage.until(send_by + TIMEOUT + SETTLE)
    stage.list_once(stage.a, without=True)
    stage.end(stage.a.ensure(1))
    stage.end(stage.a.ensure(1))


def a_young_machine_is_shown_once_and_ended(stage: Stage) -> None:
    """One list shows it early, the next two do not yet; its end was accepted, and takes its time."""
    rent = stage.a.ensure(1)
    stage.to(rent, lambda: bool(stage.world.machines))
    stage.end(rent)
    stage.until(stage.world.now + 1)
    stage.list_once(stage.a)
    machine = stage.world.machines[1]
    machine.lists_at = machine.made_at + SETTLE
    stage.claim.finished = True
    back = stage.release(stage.a)
    stage.to(back, lambda: machine.gone_at is not None)
    machine.gone_at = stage.world.now + END_LAG
    stage.end(back)
    stage.list_twice(stage.a)
    stage.end(stage.release(stage.a))
    _gone_if_released(stage)


def a_mark_goes_back(stage: Stage) -> None:
    """The store is put back to before the orders of many claims: its numbers are far below the mark."""
    stage.world.rows.sequence = 1_000_000
    _lost(stage, effect=False)
    stage.world.restore()
    stage.a.epoch = None
    stage.renew()
    stage.lead(stage.a)
    for _ in range(4):
        stage.end(stage.a.ensure(1))
        _settle(stage, stage.a)
    if not stage.world.of(1):
        raise Broken("the claim never comes to rest")


def a_token_has_run_out(stage: Stage) -> None:
    """No list was answered for so long that the same token means another machine by now."""
    _lost(stage, effect=True)
    _pass(stage, REPLAY_FOR + 1)
    stage.end(stage.a.ensure(1))


def a_release_finds_an_intent_without_a_mark(stage: Stage) -> None:
    """It calls the attempt unsent, and is over, before the sender writes its mark."""
    rent = stage.a.ensure(1)
    stage.asks(rent, 2)
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    stage.end(rent)


def a_former_leader_takes_a_number_again(stage: Stage) -> None:
    """It stood still before its intent; its successor took the next number, and a restore forgot that."""
    old = stage.a.ensure(1)
    stage.looked(old)
    next(old)
    stage.pass_time(LEASE + 1)
    stage.lead(stage.b)
    stage.lose_answer(effect=True)
    stage.end(stage.b.ensure(1))
    stage.hide()
    stage.answer()
    stage.world.restore()
    stage.end(old)
    stage.b.epoch = None
    stage.renew()
    stage.lead(stage.b)
    stage.end(stage.b.ensure(1))
    stage.end(stage.b.ensure(1))


def a_number_is_given_out_again(stage: Stage) -> None:
    """After a restore a sender takes the number of an old attempt; a second restore brings that one back."""
    _lost(stage, effect=False)
    stage.end(stage.a.ensure(1))
    _settle(stage, stage.a)
    stage.lose_answer(effect=False)
    stage.looked(settling := stage.a.ensure(1))
    stage.to(settling, lambda: stage.world.rows.rentals[1].attempts[0].outcome == "absent")
    with_the_old_one = stage.world.rows.copy()
    stage.end(settling)
    stage.answer()
    stage.world.restore()
    stage.end(stage.a.ensure(1))
    _settle(stage, stage.a)
    stage.lose_answer(effect=True)
    stage.end(stage.a.ensure(1))
    stage.hide()
    stage.answer()
    stage.world.backups = [with_the_old_one]
    stage.world.restore()
    stage.end(stage.a.ensure(1))
    stage.end(stage.a.ensure(1))


def an_unsettled_attempt_is_passed_over(stage: Stage) -> None:
    """Nobody looks for what it may have made: only its row says that there is something to look for."""
    _lost(stage, effect=True)
    stage.hide()
    stage.end(stage.a.ensure(1))
    stage.end(stage.a.ensure(1))


def a_machine_that_was_shown_is_left_out_twice(stage: Stage) -> None:
    """A former leader's list showed it, its successor's do not: more than is taken for granted of a cloud."""
    _lost(stage, effect=True)
    stage.to(stage.a.poll(), lambda: bool(stage.world.rows.rentals[1].seen))  # and it dies
    stage.leave_out(stage.world.machines[1], 10 * SETTLE)
    stage.pass_time(LEASE + 1)
    stage.lead(stage.b)
    stage.end(stage.b.ensure(1))
    _settle(stage, stage.b)
    stage.end(stage.b.ensure(1))


def two_lists_without_a_machine_are_older_than_its_end(stage: Stage) -> None:
    """It is fresh, and its first terminate says NotFound; lists leave it out for longer than they may; the
    second is accepted, and takes its time."""
    rent = stage.a.ensure(1)
    stage.to(rent, lambda: bool(stage.world.machines))
    machine = stage.hide()
    stage.end(rent)
    stage.claim.finished = True
    stage.end(stage.release(stage.a))
    _pass(stage, SETTLE)
    stage.leave_out(machine, SETTLE)
    stage.list_twice(stage.a)
    back = stage.release(stage.a)
    stage.to(back, lambda: machine.gone_at is not None)
    machine.gone_at = stage.world.now + END_LAG
    stage.end(back)
    _gone_if_released(stage)


def a_late_machine_of_one_attempt_hides_another_attempts(stage: Stage) -> None:
    """A former leader sends after all waiting for it is over, beside what its successor has sent."""
    old = stage.a.ensure(1)
    stage.marked(old)
    stage.world.faults.stall = True
    stage.world.chance = lambda odds: odds == 0.3  # type: ignore[method-assign]
    while next(old) <= stage.world.now:  # until it stands still between its fence and its send
        pass
    stage.world.faults.stall = False
    stage.answer()
    stage.pass_time(LEASE + 1)
    stage.lead(stage.b)
    stage.end(stage.b.ensure(1))
    _settle(stage, stage.b)
    rent = stage.b.ensure(1)
    stage.to(rent, lambda: bool(stage.world.machines))
    stage.hide()
    next(old)  # it wakes up, sends, and dies
    stage.claim.finished = True
    stage.end(stage.release(stage.b))
    for _ in range(3):
        stage.list_twice(stage.b)
        stage.end(stage.release(stage.b))
        _gone_if_released(stage)


def a_claim_is_torn_out_before_its_mark(stage: Stage) -> None:
    """Finalizer and all, between intent and mark: nobody asks for it again."""
    rent = stage.a.ensure(1)
    stage.asks(rent, 2)
    stage.claim.deleting = stage.claim.gone = True
    stage.end(rent)
    keep = stage.a.keep()
    for _ in range(4):
        _settle(stage, stage.a)
        while next(keep) <= stage.world.now:
            pass
    if stage.world.rows.rentals[1].state != "ended":
        raise Broken("the rental of a claim that is gone stays open")


def an_answer_is_written_down_after_the_end(stage: Stage) -> None:
    """A former leader's: the machine came and went meanwhile, and nobody had seen it."""
    old = stage.a.ensure(1)
    stage.to(old, lambda: bool(stage.world.machines))
    stage.world.vanish(stage.world.machines[1])
    stage.pass_time(LEASE + 1)
    stage.lead(stage.b)
    stage.claim.finished = True
    stage.end(stage.release(stage.b))
    _settle(stage, stage.b)
    stage.end(stage.release(stage.b))
    stage.end(old)
    keep = stage.b.keep()
    for _ in range(3):
        _pass(stage, 2 * SETTLE)
        while next(keep) <= stage.world.now:
            pass
    if any(not run.gone for run in stage.world.rows.rentals[1].runs.values()):
        raise Broken("a run stays open: it would be billed for ever")


def _lost(stage: Stage, *, effect: bool) -> None:
    """An attempt whose answer was lost."""
    stage.lose_answer(effect=effect)
    stage.end(stage.a.ensure(1))
    stage.answer()


def _pass(stage: Stage, ticks: int) -> None:
    for _ in range(ticks):
        stage.world.tick()
        stage.renew()


def _hidden_until_released(stage: Stage, back: Steps[None]) -> None:
    """Lists do not show the newest machine, if there is one, before the release has judged by them."""
    if stage.world.machines:
        stage.hide()
    stage.list_twice(stage.a)
    stage.end(back)
    _gone_if_released(stage)


def _settle(stage: Stage, controller: Controller) -> None:
    """Time passes and lists are made, until whatever was sent would be shown."""
    _pass(stage, WINDOW + TIMEOUT + SETTLE)
    stage.list_twice(controller)
    stage.list_twice(controller)


def _gone_if_released(stage: Stage, *, must: bool = False) -> None:
    if stage.claim.released and stage.world.of(1):
        raise Broken("the claim is released, and its machine is there")
    if must and not stage.claim.released:
        raise Broken("the claim is never released")


def broken_in(
    story: Callable[[Stage], None], *, without: Iterable[Clause] = (), tokens: bool = False
) -> str | None:
    """What the story breaks; None: nothing."""
    try:
        story(Stage(without, tokens=tokens))
    except Broken as broken:
        return str(broken)
    return None
