"""What a controller remembers, and how it reads and writes rows, marks and machines.

Every coroutine of a controller is a generator. It yields wherever another one may run, the process may be
paused or die, and time may pass: before each call, and after each answer. What it yields is the tick from
which it may go on (0: at once). `on(Clause…)` asks whether a clause is kept.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from tests.model.clauses import Clause
from tests.model.world import Attempt, Away, Claim, Machine, Rental, Rows, Run, World

T = TypeVar("T")
Steps = Generator[int, None, T]


@dataclass(slots=True)
class Known:
    """A machine as rounds and gets have shown it."""

    machine: Machine
    shown_at: int


@dataclass(slots=True)
class Life:
    """What this process knows of one claim."""

    uid: int
    state: str | None = None
    main: int | None = None
    look_from: int | None = None
    recalled: bool = False
    terminated: dict[int, int] = field(default_factory=dict)
    renting: bool = False
    rented_at: int | None = None


class Base:
    """One replica's process. `forget` takes its memory."""

    def __init__(self, name: str, world: World, *, without: frozenset[Clause]) -> None:
        self.name, self.world, self._without = name, world, without
        self.lease_until = -1
        self.term = 0
        self.forget()

    def forget(self) -> None:
        """A new term, or a new process, remembers nothing."""
        self.epoch: int | None = None
        self.restored = 0
        self.lives: dict[int, Life] = {}
        self.known: dict[int, Known] = {}
        self.rounds: list[int] = []
        self.highest = 0
        self.marks: dict[int, Claim] = {}
        self.loaded: int | None = None

    def on(self, clause: Clause) -> bool:
        return clause not in self._without

    def leads(self) -> bool:
        return self.world.now < self.lease_until

    def rightful(self) -> int | None:
        """Our epoch, if we may write with it now."""
        return self.epoch if self.leads() else None

    def life(self, uid: int) -> Life:
        return self.lives.setdefault(uid, Life(uid))

    def db(self, transaction: Callable[[Rows], T]) -> Steps[T]:
        yield 0
        result, restored = self.world.store(transaction), self.world.restored
        yield 0
        if self.world.restored != restored:
            raise Away  # no connection outlives a restore
        return result

    def look(self, uid: int) -> Steps[Claim | None]:
        yield 0
        claim = self.world.look(uid)
        yield 0
        return claim

    def get(self, machine_id: int) -> Steps[Machine | None]:
        yield 0
        machine = self.world.get(machine_id)
        yield 0
        if machine is not None:
            self._remember(machine, self.world.now)
        return machine

    def ours(self, rows: Rows, epoch: int) -> bool:
        return rows.epoch == epoch or not self.on(Clause.EPOCH_COMPARES)

    def _remember(self, machine: Machine, at: int) -> None:
        self.highest = max(self.highest, machine.sequence)
        known = self.known.get(machine.id)
        if known is None:
            self.known[machine.id] = Known(machine, at)
        else:
            known.shown_at = max(known.shown_at, at)

    def machines(self, uid: int) -> list[Known]:
        """What is known of the claim's machines, oldest first."""
        found = [known for known in self.known.values() if known.machine.uid == uid]
        return sorted(found, key=lambda known: (known.machine.sequence, known.machine.id))

    def absent(self, uid: int, *, first_after: int, later_after: int) -> bool:
        """Two complete lists, begun late enough, without any machine of the claim."""
        if self.on(Clause.TWO_LISTS):
            if len(self.rounds) < 2 or self.rounds[0] < first_after or self.rounds[1] < later_after:
                return False
            earlier = self.rounds[0]
        else:
            if not self.rounds or self.rounds[-1] < later_after:
                return False
            earlier = self.rounds[-1]
        return not any(known.shown_at >= earlier for known in self.machines(uid))

    def believe(self, uid: int, rental: Rental | None, live: Claim, epoch: int) -> Steps[Rental]:
        """Bring rows and mark together: what is above the mark was never sent, what it has lost may be."""
        marked = live.mark[0] if live.mark else 0
        attempts = rental.attempts if rental else []
        unsent = [one.number for one in attempts if one.outcome is None and one.sequence > marked]
        lost = live.mark if live.mark and not any(self._is(one, live.mark) for one in attempts) else None
        if not self.on(Clause.ROWS_NEED_MARK):
            lost = None
        if not unsent and lost is None:
            return rental or Rental()

        def mend(rows: Rows) -> Rental:
            mine = self.ours(rows, epoch)
            if mine and lost:
                rows.opened(uid)
            held = rows.rentals.get(uid, Rental())
            for attempt in held.attempts:
                if mine and attempt.number in unsent and attempt.outcome is None:
                    attempt.outcome = "unsent"
            if mine and lost and not any(self._is(one, lost) for one in held.attempts):
                held.attempts = [one for one in held.attempts if one.sequence != lost[0]]
                number = max((one.number for one in held.attempts), default=0) + 1
                held.attempts.append(Attempt(number, lost[0], lost[1], self.world.now, rebuilt=True))
            return held.copy()

        return (yield from self.db(mend))

    def _is(self, attempt: Attempt, mark: tuple[int, int]) -> bool:
        """Whether it is the marked one: of that number, and not an older one of a time that was restored."""
        sequence, send_by = mark
        as_new = attempt.send_by >= send_by or not self.on(Clause.MARK_DATES)
        return attempt.sequence == sequence and as_new

    def settle(self, uid: int, number: int, outcome: str, epoch: int) -> Steps[bool]:
        def close(rows: Rows) -> bool:
            rental = rows.rentals.get(uid)
            for attempt in rental.attempts if rental else ():
                if attempt.number == number and attempt.outcome is None and self.ours(rows, epoch):
                    if attempt.sends > 1 and outcome != "absent" and self.on(Clause.FIRST_SEND):
                        return False
                    attempt.outcome = outcome
                    return True
            return False

        return (yield from self.db(close))

    def record(self, uid: int, run: Run, outcome: str, epoch: int) -> Steps[tuple[str, int | None]]:
        """Write the machine down, close its attempt, make an open rental live. The state, and its machine."""

        def close(rows: Rows) -> None:
            rental = rows.rentals.setdefault(uid, Rental())
            for attempt in rental.attempts:
                if attempt.number == run.attempt and attempt.outcome is None and self.ours(rows, epoch):
                    attempt.outcome = outcome

        def write(rows: Rows) -> tuple[str, int | None]:
            rental = rows.rentals.setdefault(uid, Rental())
            held = rental.runs.setdefault(run.id, run)
            held.seen = held.seen or run.seen
            if rental.state == "open" and self.ours(rows, epoch):
                rental.state, rental.main = "live", run.id
            return rental.state, rental.main

        if self.on(Clause.RECORD_AT_ONCE):

            def both(rows: Rows) -> tuple[str, int | None]:
                close(rows)
                return write(rows)

            return (yield from self.db(both))
        yield from self.db(close)
        return (yield from self.db(write))

    def _begin_ending(self, life: Life, epoch: int) -> Steps[str | None]:
        def begin(rows: Rows) -> str | None:
            if not self.ours(rows, epoch):
                return None
            missing = life.uid not in rows.rentals or rows.rentals[life.uid].state == "none"
            if missing and not self.on(Clause.MISSING_IS_ENDING):
                return "ending"
            rental = rows.rentals.setdefault(life.uid, Rental())
            if rental.state != "ended":
                rental.state = "ending"
            return rental.state

        state = yield from self.db(begin)
        life.state = state or life.state
        return state

    def _adopt(self, life: Life, known: Known, epoch: int) -> Steps[str]:
        machine = known.machine
        run = Run(machine.id, machine.attempt, None, seen=True)
        life.state, life.main = yield from self.record(life.uid, run, "found", epoch)
        return "rented" if life.state == "live" and life.main == machine.id else "wait"

    def _recall(self, life: Life) -> Steps[None]:
        """Get what rounds of earlier processes have shown."""
        if life.recalled:
            return
        seen = yield from self.db(lambda rows: sorted(rows.rentals.get(life.uid, Rental()).seen))
        for machine_id in seen:
            if machine_id not in self.known:
                yield from self.get(machine_id)
        life.recalled = True


def copied(rental: Rental | None) -> Rental | None:
    return rental.copy() if rental else None


def set_gone(rows: Rows, uid: int, machine_id: int) -> None:
    if uid in rows.rentals and machine_id in rows.rentals[uid].runs:
        rows.rentals[uid].runs[machine_id].gone = True
