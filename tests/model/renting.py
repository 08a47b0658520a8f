"""`ensure`: rent exactly one machine for a claim, or say why not."""

from tests.model.base import Base, Known, Life, Steps, copied
from tests.model.clauses import Clause
from tests.model.world import (
    REPLAY_FOR,
    SETTLE,
    TIMEOUT,
    WINDOW,
    Attempt,
    Away,
    Claim,
    Refused,
    Rental,
    Rows,
    Run,
    Unknown,
)


class Renting(Base):
    """The order of the steps is the safety: intent, mark, fence, send, record."""

    def ensure(self, uid: int) -> Steps[str]:
        """Rent one machine: ``rented``, ``refused``, ``over``, or ``wait``."""
        life = self.life(uid)
        if life.renting and self.on(Clause.ENSURE_ALONE):
            return "wait"
        life.renting = True
        try:
            return (yield from self._ensure(life))
        except (Away, Unknown, Refused):
            return "wait"
        finally:
            life.renting = False

    def _ensure(self, life: Life) -> Steps[str]:
        uid, once = life.uid, self.on(Clause.ONCE)
        epoch = self.rightful()
        if epoch is None:
            return "wait"
        if once and life.state in ("ending", "ended"):
            return "over"
        rental: Rental | None = yield from self.db(lambda rows: copied(rows.rentals.get(uid)))
        life.state = rental.state if rental else None
        if once and life.state in ("ending", "ended"):
            return "over"
        if rental and life.state == "live":
            life.main = rental.main
            return "rented"
        live = yield from self.look(uid)
        if live is None or live.deleting:
            return "over"
        if not self.on(Clause.MARK_LIVE):
            live = self.marks.get(uid, live)
        rental = yield from self.believe(uid, rental, live, epoch)
        if live.instance is not None:
            yield from self.get(live.instance)
        if rental.attempts and self.on(Clause.SHOWN_IS_FOUND):
            yield from self._recall(life)
        if self.on(Clause.ADOPT) and (found := self._found(uid, rental)):
            return (yield from self._adopt(life, found[0], epoch))
        if run := next((run for run in rental.runs.values() if not run.gone), None):
            yield from self.record(uid, run, "found", epoch)
            return "wait"
        if rental.unsettled() and self.on(Clause.UNKNOWN_WAITS):
            if not (yield from self._settled(life, rental, live, epoch)):
                return "wait"
            rental = yield from self.db(lambda rows: copied(rows.rentals.get(uid)) or Rental())
            if rental.unsettled() or rental.state not in ("none", "open"):
                return "wait"
        if rental.attempts and rental.attempts[-1].outcome == "rejected":
            return "refused"
        if live.instance is not None:
            yield from self._begin_ending(life, epoch)
            return "over"
        return (yield from self._attempt(life, rental, live, epoch))

    def _found(self, uid: int, rental: Rental) -> list[Known]:
        found = self.machines(uid)
        if not self.on(Clause.SHOWN_IS_FOUND) and self.rounds:
            found = [known for known in found if known.shown_at >= self.rounds[-1]]
        return found

    def _settled(self, life: Life, rental: Rental, live: Claim, epoch: int) -> Steps[bool]:
        """Look for what unsettled attempts may have made. True: all are proven absent, and written so."""
        now = self.world.now
        if life.look_from is None:
            life.look_from = now
        pending = rental.unsettled()
        later = max(attempt.send_by for attempt in pending) + TIMEOUT + SETTLE
        if not self.on(Clause.SETTLE_AFTER):
            later = life.look_from
        first = max(life.look_from, later) if self.on(Clause.BOTH_SETTLE) else life.look_from
        if self.absent(life.uid, first_after=first, later_after=later):
            for attempt in pending:
                yield from self.settle(life.uid, attempt.number, "absent", epoch)
            life.look_from = None
            return True
        if len(pending) == 1 and self.world.faults.tokens and not pending[0].rebuilt:
            yield from self._replay(life, pending[0], live, epoch)
        return False

    def _replay(self, life: Life, attempt: Attempt, live: Claim, epoch: int) -> Steps[None]:
        uid, began = life.uid, self.world.now
        in_time, as_send = self.on(Clause.REPLAY_IN_TIME), self.on(Clause.REPLAY_IS_A_SEND)

        def again(rows: Rows) -> int | None:
            rental, now = rows.rentals.get(uid), self.world.now
            if rental is None or rows.epoch != epoch:
                return None
            if rental.state != "open" and self.on(Clause.REPLAY_OPEN):
                return None
            for held in rental.attempts:
                if held.number == attempt.number and held.outcome is None:
                    if in_time and now + WINDOW + TIMEOUT > held.created_at + REPLAY_FOR:
                        return None
                    held.sends += 1
                    if as_send:
                        held.send_by = now + WINDOW
                    return held.send_by
            return None

        send_by = yield from self.db(again)
        if send_by is None:
            return
        if as_send:
            yield from self._mark(uid, (attempt.sequence, send_by), live)
            if not (yield from self._may_send(uid, attempt.number, began, epoch, replay=True)):
                return
        yield from self._send(life, attempt.number, attempt.sequence, epoch, first=False)

    def _attempt(self, life: Life, rental: Rental, live: Claim, epoch: int) -> Steps[str]:
        uid, world = life.uid, self.world
        number = max((one.number for one in rental.attempts), default=0) + 1
        above = max(self.highest, live.mark[0] if live.mark else 0, *self._noted())
        if not self.on(Clause.SEQUENCE_ABOVE):
            above = 0
        began = world.now

        def intend(rows: Rows) -> tuple[int, int] | None:
            rows.sequence = max(rows.sequence, above) + 1
            held = rows.opened(uid)
            if not self.ours(rows, epoch) or (held.state != "open" and self.on(Clause.ONCE)):
                return None
            if held.unsettled() and self.on(Clause.ONE_AT_A_TIME):
                return None
            if any(one.number == number for one in held.attempts):
                return None
            held.attempts.append(Attempt(number, rows.sequence, world.now + WINDOW, world.now))
            return rows.sequence, world.now + WINDOW

        life.state = life.state or "open"  # also where the answer is lost
        intent = yield from self.db(intend)
        if intent is None:
            return "wait"
        sequence, send_by = intent
        if self.on(Clause.MARK):
            try:
                yield from self._mark(uid, (sequence, send_by), live)
            except Refused:
                if not self.on(Clause.UNMARKED_STAYS):
                    yield from self.settle(uid, number, "unsent", epoch)
                return "wait"
        if not (yield from self._may_send(uid, number, began, epoch)):
            yield from self.settle(uid, number, "unsent", epoch)
            return "wait"
        return (yield from self._send(life, number, sequence, epoch, first=True))

    def _noted(self) -> list[int]:
        return [claim.mark[0] for claim in self.marks.values() if claim.mark] or [0]

    def _mark(self, uid: int, mark: tuple[int, int], live: Claim) -> Steps[None]:
        version = live.version if self.on(Clause.MARK_COMPARES) else None
        yield 0
        self.world.write_mark(uid, mark, version=version)
        live.version += 1
        yield 0

    def _may_send(
        self, uid: int, number: int, began: int, epoch: int, *, replay: bool = False
    ) -> Steps[bool]:
        """The fence: rows first, then what only we can know."""
        once = self.on(Clause.ONCE) and (self.on(Clause.REPLAY_OPEN) or not replay)

        def allowed(rows: Rows) -> bool:
            rental = rows.rentals.get(uid)
            if self.on(Clause.FENCE_LEADER) and not self.ours(rows, epoch):
                return False
            if not self.on(Clause.FENCE_ROWS):
                return True
            if rental is None or (rental.state != "open" and once):
                return False
            return any(one.number == number and one.outcome is None for one in rental.attempts)

        if not (yield from self.db(allowed)):
            return False
        if self.on(Clause.FENCE_SEND_BY) and self.world.now >= began + WINDOW:
            return False
        return not self.on(Clause.FENCE_LEADER) or self.rightful() == epoch

    def _send(self, life: Life, number: int, sequence: int, epoch: int, *, first: bool) -> Steps[str]:
        world, uid = self.world, life.uid
        stood = False
        if world.faults.stall and world.chance(0.3):
            fenced_at = world.now
            yield world.now + world.below(WINDOW + TIMEOUT + SETTLE)
            stood = world.now > fenced_at
        call = world.create(uid, number, sequence, who=self.name, stood=stood)
        yield call.answer_at
        if call.answer == "lost":
            if self.on(Clause.ONE_SEND):
                return "wait"
            call = world.create(uid, number, sequence, who=f"{self.name}'s client", stood=stood)
            yield call.answer_at
        if call.answer == "accepted" and call.machine is not None:
            machine = call.machine
            run = Run(machine.id, number, world.now, seen=False)
            life.state, life.main = yield from self.record(uid, run, "accepted", epoch)
            life.rented_at = world.now
            return "rented" if life.state == "live" and life.main == machine.id else "wait"
        if call.answer in ("avoided", "rejected") and (first or not self.on(Clause.FIRST_SEND)):
            settled = yield from self.settle(uid, number, call.answer, epoch)
            return "refused" if settled and call.answer == "rejected" else "wait"
        return "wait"
