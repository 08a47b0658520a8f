"""`release`: no machine of this claim exists any more, and none can appear by our doing."""

from tests.model.base import Base, Life, Steps, copied
from tests.model.clauses import Clause
from tests.model.world import SETTLE, TIMEOUT, Away, Refused, Rental, Rows, Run, Unknown


class Releasing(Base):
    """It never sends a create: it ends what is known, looks for what may be, and concludes after both."""

    def release(self, uid: int) -> Steps[bool]:
        """True: no machine of the claim exists, and none can appear by our doing."""
        life = self.life(uid)
        if life.state == "ended":
            return True
        if not self.leads():
            return False
        try:
            epoch = self.rightful()
            if epoch is not None:
                return (yield from self._release(life, epoch))
            return (yield from self._without_store(life))
        except Away:
            return (yield from self._without_store(life))
        except (Unknown, Refused):
            return False

    def _release(self, life: Life, epoch: int) -> Steps[bool]:
        uid, early = life.uid, None
        if not self.on(Clause.LOOK_AFTER_ENDING):
            early = yield from self.look(uid)
        if self.on(Clause.ENDING_FIRST):
            state = yield from self._begin_ending(life, epoch)
            if state is None:
                return (yield from self._without_store(life))
            if state == "ended":
                return True
        live = early or (yield from self.look(uid))
        rental: Rental | None = yield from self.db(lambda rows: copied(rows.rentals.get(uid)))
        rental = rental or Rental()
        if live is not None:
            rental = yield from self.believe(uid, rental, live, epoch)
        if live is not None and live.mark is None and not rental.runs and not self.machines(uid):
            return (yield from self._end(life, epoch))
        yield from self._recall(life)
        targets = {run.id for run in rental.runs.values() if not run.gone}
        if self.on(Clause.BY_IDENTITY):
            for known in self.machines(uid):
                if known.machine.id not in rental.runs:
                    yield from self._adopt(life, known, epoch)
                targets.add(known.machine.id)
            rental = yield from self.db(lambda rows: copied(rows.rentals.get(uid)) or Rental())
        hint = live.instance if live is not None else None
        if hint is not None and hint not in rental.runs and (yield from self.get(hint)) is not None:
            targets.add(hint)
        if not (yield from self._terminate(life, rental, targets)):
            return False
        if not self._absent(life, rental):
            return False
        if self.on(Clause.GET_CONFIRMS):
            for machine_id in sorted(targets):
                if (yield from self.get(machine_id)) is not None:
                    if self.on(Clause.TERMINATE_REPEATS):
                        life.terminated.pop(machine_id, None)
                    return False
        for machine_id in live.unrecorded if live is not None else ():
            if machine_id not in rental.runs:
                if (yield from self.get(machine_id)) is not None:
                    return False
                run = Run(machine_id, self.world.machines[machine_id].attempt, None, seen=True)
                yield from self.record(uid, run, "found", epoch)
        return (yield from self._end(life, epoch))

    def _terminate(self, life: Life, rental: Rental, targets: set[int]) -> Steps[bool]:
        accepted = True
        for machine_id in sorted(targets):
            asked = life.terminated.get(machine_id)
            if asked is not None and not self._shown_since(machine_id, asked):
                continue
            yield 0
            try:
                answer = self.world.terminate(machine_id, who=self.name)
            except Unknown:
                accepted = False
                continue
            yield 0
            fresh = answer == "not_found" and self._may_appear(rental.runs.get(machine_id), rental)
            if not (fresh and self.on(Clause.NOT_FOUND_REPEATS)):
                life.terminated[machine_id] = self.world.now
        return accepted

    def _shown_since(self, machine_id: int, asked: int) -> bool:
        """Whether a list still shows it long after its end was accepted: then that had no effect."""
        known = self.known.get(machine_id)
        late = asked + SETTLE
        return self.on(Clause.TERMINATE_REPEATS) and known is not None and known.shown_at > late

    def _until(self, run: Run, rental: Rental) -> int:
        """From when on a list must show this recorded machine."""
        attempt = next((one for one in rental.attempts if one.number == run.attempt), None)
        if attempt is not None and (attempt.sends > 1 or run.accepted_at is None):
            return attempt.send_by + TIMEOUT + SETTLE
        return (run.accepted_at or 0) + SETTLE

    def _may_appear(self, run: Run | None, rental: Rental) -> bool:
        return run is not None and not run.seen and self._until(run, rental) > self.world.now

    def _absent(self, life: Life, rental: Rental) -> bool:
        now = self.world.now
        if life.look_from is None:
            life.look_from = now
        first = life.look_from
        if self.on(Clause.AFTER_TERMINATE):
            first = max([first, *life.terminated.values()])
        nameless: list[int] = []
        waits: list[int] = []
        found = {run.attempt for run in rental.runs.values()}
        for attempt in rental.attempts:
            if not self.on(Clause.EVERY_ATTEMPT) and found:
                continue
            if attempt.outcome is None or attempt.sends > 1:
                nameless.append(attempt.send_by + TIMEOUT + SETTLE)
        if self.on(Clause.NEVER_SHOWN_WAITS):
            waits += [
                self._until(run, rental) for run in rental.runs.values() if not run.seen and not run.gone
            ]
        if not self.on(Clause.SETTLE_AFTER):
            waits, nameless = [], []
        if self.on(Clause.BOTH_SETTLE):
            first = max([first, *nameless])
        waits += nameless
        return self.absent(life.uid, first_after=first, later_after=max([first, *waits]))

    def _end(self, life: Life, epoch: int) -> Steps[bool]:
        def end(rows: Rows) -> bool:
            missing = life.uid not in rows.rentals or rows.rentals[life.uid].state == "none"
            if missing and not self.on(Clause.MISSING_IS_ENDING):
                return True
            rental = rows.rentals.setdefault(life.uid, Rental())
            strict = self.on(Clause.STRICT_END) and self.on(Clause.ENDING_FIRST)
            if self.ours(rows, epoch) and (rental.state == "ending" or not strict):
                rental.state = "ended"
                for attempt in rental.attempts:
                    attempt.outcome = attempt.outcome or "absent"
                for run in rental.runs.values():
                    run.gone = True
            return rental.state == "ended"

        if not (yield from self.db(end)):
            return False
        life.state = "ended"
        for known in self.machines(life.uid):
            del self.known[known.machine.id]
        return True

    def _without_store(self, life: Life) -> Steps[bool]:
        """End what is known, and conclude nothing."""
        live = yield from self.look(life.uid)
        if live is not None and live.wanted:
            return False
        targets = {known.machine.id for known in self.machines(life.uid)}
        if live is not None and live.instance is not None:
            targets.add(live.instance)
        untold = targets - life.terminated.keys()
        if live is not None and untold - set(live.unrecorded) and self.on(Clause.REMEMBERED):
            told = tuple(sorted({*live.unrecorded, *untold}))
            yield 0
            try:
                self.world.write_unrecorded(life.uid, told, version=live.version)
            except Refused:
                return False
        for machine_id in sorted(targets - life.terminated.keys()):
            yield 0
            try:
                self.world.terminate(machine_id, who=self.name)
            except Unknown:
                return False
            life.terminated[machine_id] = self.world.now
        return bool(targets) and not self.on(Clause.ROWS_FIRST)
