"""A whole controller: it leads, lists, follows what lists show, and does what its callers ask."""

import contextlib
import copy

from tests.model.base import Known, Life, Steps, copied, set_gone
from tests.model.clauses import Clause
from tests.model.releasing import Releasing
from tests.model.renting import Renting
from tests.model.world import LEASE, SETTLE, Away, Machine, Rental, Rows, Unknown


class Controller(Renting, Releasing):
    """One replica, with everything that it does by itself."""

    def lead(self) -> Steps[None]:
        """Hold the Lease, or wait for it; then settle one epoch on both sides."""
        world = self.world
        while True:
            began = world.now
            yield 0
            holder, renewed_at, epoch = world.lease
            if holder == self.name and self.leads():
                world.lease = (self.name, world.now, epoch)
                self.lease_until = began + LEASE
            elif world.now > renewed_at + LEASE:
                world.lease = (self.name, world.now, epoch + 1)
                self.forget()
                self.term += 1
                self.lease_until = began + LEASE
                world.note(f"{self.name} leads")
            yield 0
            if self.leads():
                with contextlib.suppress(Away):
                    yield from self._settle_epoch()
            yield world.now + 3

    def _settle_epoch(self) -> Steps[None]:
        world = self.world
        stored, restored = yield from self.db(lambda rows: (rows.epoch, world.restored))
        if not self.on(Clause.RESTORE_SEEN):
            restored = 0
        if self.epoch is not None and stored == self.epoch and restored == self.restored:
            return
        self.epoch = None
        lease_epoch = world.lease[2]
        above_both = self.on(Clause.EPOCH_ABOVE_BOTH)

        def raise_it(rows: Rows) -> int:
            rows.epoch = (max(rows.epoch, lease_epoch) if above_both else rows.epoch) + 1
            return rows.epoch

        if not self.leads():
            return
        epoch = yield from self.db(raise_it)
        holder, renewed_at, theirs = world.lease
        if holder == self.name:
            world.lease = (holder, renewed_at, max(theirs, epoch))
            self.epoch, self.restored = epoch, restored

    def poll(self) -> Steps[None]:
        """List, again and again. A round's moment is the one before it was asked for."""
        world = self.world
        while True:
            began = world.now
            yield 0
            try:
                shown = world.listed(self.name)
            except Unknown:
                yield world.now + 1
                continue
            yield 0
            for machine in shown.values():
                self._remember(machine, began)
            self.rounds = [*self.rounds[-1:], began]
            self.marks = {uid: copy.copy(claim) for uid, claim in world.claims.items() if not claim.gone}
            if self.leads():
                try:
                    yield from self._record_seen(list(shown.values()))
                    yield from self._follow()
                except (Away, Unknown):
                    pass
            yield world.now + 2

    def _record_seen(self, machines: list[Machine]) -> Steps[None]:
        def record(rows: Rows) -> None:
            for machine in machines:
                rental = rows.rentals.get(machine.uid)
                if rental is not None:
                    rental.seen.add(machine.id)
                    if machine.id in rental.runs:
                        rental.runs[machine.id].seen = True

        yield from self.db(record)

    def _follow(self) -> Steps[None]:
        """Adopt on open; end extras on live, and what comes late on ended; meet what is unknown."""
        for uid in sorted({known.machine.uid for known in self.known.values()}):
            epoch = self.rightful()
            if epoch is None:
                return
            life, known = self.life(uid), self.machines(uid)
            if life.state is None:
                rental: Rental | None = yield from self.db(
                    lambda rows, uid=uid: copied(rows.rentals.get(uid))  # type: ignore[misc]
                )
                if rental is not None and rental.state != "none":
                    life.state, life.main = rental.state, rental.main
                elif (yield from self.look(uid)) is None:
                    yield from self.release(uid)
                    continue
                else:
                    continue
            if life.state == "open" and known and self.on(Clause.ADOPT):
                yield from self._adopt(life, known[0], epoch)
            elif life.state in ("live", "ended"):
                for one in known:
                    if life.state == "live" and one.machine.id == life.main:
                        yield from self._check_gone(one)
                    elif self.on(Clause.END_EXTRAS):
                        yield from self._end_extra(life, one, epoch)

    def _check_gone(self, known: Known) -> Steps[None]:
        """Two complete lists without it, and a get: only then is a recorded machine gone."""
        if len(self.rounds) < 2 or known.shown_at >= self.rounds[0]:
            return
        if self.on(Clause.GONE_BY_GET) and (yield from self.get(known.machine.id)) is not None:
            return
        self.world.believed_gone(known.machine.id)

    def _end_extra(self, life: Life, extra: Known, epoch: int) -> Steps[None]:
        machine_id, now = extra.machine.id, self.world.now
        asked = life.terminated.get(machine_id)
        if asked is None:
            await_rows = yield from self._adopt(life, extra, epoch)
            if await_rows == "rented":
                return  # the rows know better than our memory
            if not self.on(Clause.EXTRA_KEEPS_STATE):
                yield from self._begin_ending(life, epoch)
        if asked is None or (extra.shown_at > asked + SETTLE):
            yield 0
            self.world.terminate(machine_id, who=self.name)
            life.terminated[machine_id] = now
            return
        if len(self.rounds) < 2 or self.rounds[0] <= asked or extra.shown_at >= self.rounds[0]:
            return
        if (yield from self.get(machine_id)) is None:
            self.known.pop(machine_id, None)
            yield from self.db(lambda rows: set_gone(rows, life.uid, machine_id))

    def _load(self) -> Steps[None]:
        """Once an epoch: what the rows say counts, also where it is less than before."""
        if self.loaded == self.epoch:
            return
        epoch = self.epoch
        rentals = yield from self.db(
            lambda rows: {
                uid: (one.state, one.main) for uid, one in rows.rentals.items() if one.state != "none"
            }
        )
        for life in self.lives.values():
            if life.uid not in rentals and life.state != "ended":
                life.state, life.main, life.recalled = None, None, False
        for uid, (state, main) in rentals.items():
            life = self.life(uid)
            life.state, life.main = state, main
        self.loaded = epoch

    def _close_strays(self) -> Steps[None]:
        """A run that nobody follows, since it was written down late: a get says whether it is over."""
        now = self.world.now

        def strays(rows: Rows) -> list[tuple[int, int]]:
            return [
                (uid, run.id)
                for uid, rental in rows.rentals.items()
                for run in rental.runs.values()
                if rental.state in ("none", "ended")
                and not run.gone
                and (run.seen or (run.accepted_at or 0) + SETTLE < now)
            ]

        found: list[tuple[int, int]] = []
        if self.on(Clause.STRAYS_END):
            found = yield from self.db(strays)
        for uid, run_id in found:
            if (yield from self.get(run_id)) is None:
                yield from self.db(lambda rows, uid=uid, run_id=run_id: set_gone(rows, uid, run_id))  # type: ignore[misc]

    def keep(self) -> Steps[None]:
        """Release every rental whose claim a live GET says is gone."""
        world = self.world
        while True:
            yield world.now + 5
            if self.rightful() is None or not self.on(Clause.GONE_IS_RELEASED):
                continue
            try:
                yield from self._load()
                yield from self._close_strays()
                for uid in [one.uid for one in self.lives.values() if one.state not in (None, "ended")]:
                    if self.leads() and (yield from self.look(uid)) is None:
                        yield from self.release(uid)
            except (Away, Unknown):
                pass

    def rent(self, uid: int) -> Steps[None]:
        """What the virtual node does: ask until it is rented, refused or over."""
        world = self.world
        while True:
            claim = world.claims[uid]
            yield 0
            if self.leads() and claim.wanted:
                outcome = yield from self.ensure(uid)
                life = self.life(uid)
                if outcome == "rented" and life.main is not None:
                    world.tell_bound(uid, life.main)
                elif outcome in ("refused", "over") and claim.wanted:
                    claim.finished = True  # its Pod has failed
                    claim.version += 1
            yield world.now + (1 if claim.bound is None else 4)

    def give_back(self, uid: int) -> Steps[None]:
        """What the claims' controller does: ask until it is released, then take the finalizer off."""
        world = self.world
        while True:
            claim = world.claims[uid]
            yield 0
            if self.leads() and not claim.wanted and not claim.gone:
                released = yield from self.release(uid)
                if released or not self.on(Clause.FINALIZER_LAST):
                    if released:
                        claim.released = True
                    yield 0
                    world.drop_finalizer(uid)
            yield world.now + (2 if claim.wanted else 1)
