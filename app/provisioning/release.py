"""`release`: no machine of this claim exists any more, and none can appear by our doing. Design section 5.

It never sends a create. It commits ``ending`` before its first call, so that no sender can pass the fence
afterwards; then it ends what is known, looks for what may be, and only says ``Released`` after both.
"""

from collections.abc import Collection
from datetime import UTC, datetime

import structlog

from app.inventory.accounts import Account
from app.inventory.identity import parse
from app.inventory.rounds import Known
from app.provisioning.core import Core, terminate_fact
from app.provisioning.lives import Life, Looked, Parted
from app.provisioning.model import (
    ClaimPort,
    ClaimSpec,
    ClaimUnreadable,
    LiveClaim,
    Release,
    Released,
    Releasing,
    Unrecorded,
    Why,
)
from app.provisioning.steps import reach
from app.provisioning.tail import save_tail
from app.store import rentals
from app.store.engine import StoreUnavailable, single
from app.store.rentals import NO_ROWS, Rows, RunRow
from providers.base import ProviderError, Ref, ResourceId, Terminated

log = structlog.get_logger()
POD_DELETED = "pod deleted"
UNTOLD_S = 60.0  # how long a machine is left running that nothing can take down
NOBODY_READS = (POD_DELETED, "pod gone")  # reasons why a machine is released whose output nobody will ask for


class Releaser:
    """Works on one claim at a time for each claim, beside `Renter`: the rows keep them apart."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def release(self, claim: ClaimSpec, *, port: ClaimPort, reason: str) -> Release:
        core = self._core
        life = core.life(claim)
        if life.state == "ended":
            return Released()
        async with life.releasing:
            if life.state == "ended":
                return Released()
            if not core.leadership.valid():
                return self._again(life, False, Why.NOT_LEADER, "another replica leads")
            try:
                epoch = core.epoch()
                if epoch is not None:
                    return await self._release(life, port, reason, epoch)
                why = Why.NOT_LEADER
            except StoreUnavailable:
                why = Why.NO_STORE
            return await self._without_store(life, port, why)

    async def _release(self, life: Life, port: ClaimPort, reason: str, epoch: int) -> Release:
        core, claim = self._core, life.claim
        if (waiting := self._still_parted(life, epoch)) is not None:
            return waiting
        life.parted = None
        committed = life.ending_epoch == epoch
        if not committed:
            life.looked = None
            reach("ending.before")
            async with single(core.engine) as conn:
                state = await rentals.begin_ending(conn, claim.columns(), reason=reason, epoch=epoch)
            reach("ending.after")
            if state is None:  # the store has another epoch than ours: it was restored, or we are late
                return await self._without_store(life, port, Why.NOT_LEADER)
            life.ending_epoch = epoch
            if life.state != state:
                life.state = state
                core.notify(claim.uid)
            if state == "ended":
                return Released()
        core.inventory.stir(claim.key, claim.uid)
        try:
            live = await self._look(life, port)
        except ClaimUnreadable as error:
            await self._adopted(life, await core.load(claim), epoch)
            return await self._end_known(life, Why.NO_CLUSTER, str(error))
        rows = await core.load(claim)
        if rows.unsettled():  # whoever has sent it may yet have the claim remember its machine
            life.looked = None
        if committed and rows.state != "ending":  # restored, or changed by another replica: begin anew
            life.ending_epoch = None
            return await self._release(life, port, reason, epoch)
        if live is not None:
            rows = await core.believe(claim, rows, live, epoch=epoch)
        known = core.machines(life)
        if live is not None and live.mark is None and not rows.runs and not known and claim.instance is None:
            return await self._ended(life, [], epoch)  # nothing was ever sent
        account = core.accounts.get(claim.key)
        if account is None:
            return self._again(life, False, Why.NO_ACCOUNT, f"provider {claim.provider} is not usable here")
        wrong = core.wrong_account(account) or core.marked_elsewhere(account, rows, live)
        if wrong is not None:
            return self._again(life, False, Why.WRONG_ACCOUNT, wrong)
        recalled = await core.recall(life, account)
        rows = await self._adopted(life, rows, epoch)
        if not recalled:
            return await self._end_known(life, Why.TERMINATING, "what was shown before cannot be looked at")
        targets = self._targets(life, rows, core.machines(life)) | await self._hinted(life, account, rows)
        if reason not in NOBODY_READS:
            await save_tail(core, life, account)
        accepted = await self._terminate(life, account, rows, targets)
        ages_s = [attempt.age_s for attempt in rows.unsettled()]
        ages_s += self._still_to_appear_s(life, account, rows, targets)
        unknown_s = max(ages_s, default=0.0)
        if not accepted:
            why = "the cloud has not taken every request yet"
            return self._again(life, False, Why.TERMINATING, why, unknown_s=unknown_s)
        if not self._absent(life, account, rows, live):
            if all(resource_id in life.terminated for resource_id in targets):
                life.parted = Parted(at=core.clock(), unknown_s=unknown_s)
            why = "waiting for two complete lists without it"
            return self._again(life, True, Why.TERMINATING, why, unknown_s=unknown_s)
        places = core.places(claim, {attempt.region for attempt in rows.attempts} | {claim.region})
        if (doubt := core.doubt(claim, places or (), rows)) is not None:
            return self._again(life, True, Why.UNKNOWN, doubt, unknown_s=unknown_s)
        if not await self._confirmed(life, account, targets):
            why = "a get by id still shows it, or gave no answer"
            return self._again(life, True, Why.TERMINATING, why, unknown_s=unknown_s)
        if not await self._write_remembered(life, account, rows, live, epoch):
            why = "a machine of a time without a database is there, or gave no answer"
            return self._again(life, True, Why.TERMINATING, why, unknown_s=unknown_s)
        return await self._ended(life, list(targets.values()), epoch)

    async def _adopted(self, life: Life, rows: Rows, epoch: int) -> Rows:
        """The rows once every machine that was shown for the claim has its own."""
        for machine in self._core.machines(life):
            if all(run.resource_id != machine.ref.resource_id for run in rows.runs):
                await self._core.adopt(life, machine, epoch=epoch)
                if (at := life.terminated.get(machine.ref.resource_id)) is not None:
                    self._core.facts.put_nowait(terminate_fact(machine.ref, at=at))
                rows = await self._core.load(life.claim)
        return rows

    @staticmethod
    async def _look(life: Life, port: ClaimPort) -> LiveClaim | None:
        """The claim as it was after ``ending`` was committed, so that no mark is missed on which anything was
        sent: whoever marks it later meets the fence. So it is read once for each commit, but where an attempt
        is unsettled or we have had it remember a machine.

        Raises:
            ClaimUnreadable: the server did not tell.
        """
        if life.looked is None:
            life.looked = Looked(live=await port.look(life.claim))
        return life.looked.live

    def _still_parted(self, life: Life, epoch: int) -> Releasing | None:
        """What the last pass has answered, while another one could not answer anything else.

        Until two whole lists have begun since the last terminate nothing can be concluded, and asking rows
        and claim again for that was two thirds of what a Pod's end cost the database.
        """
        core, claim, parted = self._core, life.claim, life.parted
        if parted is None or life.ending_epoch != epoch or life.state != "ending":
            return None
        there = {known.ref.resource_id for known in core.machines(life)}
        if claim.instance is not None:
            there.add(claim.instance.resource_id)
        place = core.inventory.place(claim.key, claim.region)
        if place is None or not there <= life.terminated.keys():
            return None
        if any(self._without_effect(life, known.ref) for known in core.machines(life)):
            return None  # no list need be whole for that
        since = max([parted.at if life.look_from is None else life.look_from, *life.terminated.values()])
        if core.inventory.two_complete(place, first_after=since, later_after=since) is not None:
            return None
        core.inventory.stir(claim.key, claim.uid)
        unknown_s = parted.unknown_s + core.clock() - parted.at if parted.unknown_s else 0.0
        why = "waiting for two complete lists without it"
        return self._again(life, True, Why.TERMINATING, why, unknown_s=unknown_s)

    def _targets(self, life: Life, rows: Rows, known: list[Known]) -> dict[ResourceId, Ref]:
        """Every machine to end: recorded by us, or shown with the claim's identity."""
        claim = life.claim
        targets = {
            run.resource_id: Ref(
                provider=claim.provider,
                account=claim.account,
                region=run.region,
                resource_id=run.resource_id,
            )
            for run in rows.runs
            if not run.gone
        }
        return targets | {machine.ref.resource_id: machine.ref for machine in known}

    async def _hinted(self, life: Life, account: Account, rows: Rows) -> dict[ResourceId, Ref]:
        """The machine on the claim's status, where the rows do not know it and the cloud says it is ours.

        Whoever may edit the status could name any machine there; only its identity is believed.
        """
        hint = life.claim.instance
        if hint is None or any(run.resource_id == hint.resource_id for run in rows.runs):
            return {}
        try:
            machine = await self._core.get(account, hint)
        except ProviderError as error:
            log.info("get failed", resource=hint.resource_id, error=str(error))
            return {}
        ours = machine is not None and self._is_ours(life.claim, machine.identity)
        return {hint.resource_id: hint} if ours else {}

    async def _terminate(
        self, life: Life, account: Account, rows: Rows, targets: dict[ResourceId, Ref]
    ) -> bool:
        """Have the cloud take one terminate for every machine; True when it has."""
        runs = {run.resource_id: run for run in rows.runs}
        accepted = True
        for resource_id, ref in sorted(targets.items()):
            if resource_id in life.terminated and not self._without_effect(life, ref):
                continue
            reach("terminate.before")
            answer = await self._core.terminate(life, account, ref)
            reach("terminate.after")
            if answer is None:
                accepted = False
                continue
            now = self._core.clock()
            fresh = answer is Terminated.NOT_FOUND and self._may_appear(runs.get(resource_id), rows, account)
            if not fresh:  # a fresh id may not be visible yet: then it is asked again, each time
                life.terminated[resource_id] = now
            self._core.facts.put_nowait(terminate_fact(ref, at=now))
        return accepted

    def _without_effect(self, life: Life, ref: Ref) -> bool:
        """A list shows it long after its end was accepted: accepted is not gone, so it is asked again."""
        known = self._core.inventory.known(ref)
        patience_s = self._core.settings.backoff_max_s
        late = life.terminated[ref.resource_id] + patience_s
        return known is not None and known.machine.exists and known.shown_at > late

    def _may_appear(self, run: RunRow | None, rows: Rows, account: Account) -> bool:
        """Whether a machine that no list and no get has shown may still become visible."""
        return run is not None and not run.seen and self._until_s(run, rows, account) > 0

    def _still_to_appear_s(
        self, life: Life, account: Account, rows: Rows, targets: dict[ResourceId, Ref]
    ) -> list[float]:
        """How long ago the orders were taken whose machine a terminate has not found, and may find yet."""
        return [
            max(run.accepted_ago_s or 0.0, 0.001)
            for run in rows.runs
            if run.resource_id in targets
            and run.resource_id not in life.terminated
            and self._may_appear(run, rows, account)
        ]

    def _until_s(self, run: RunRow, rows: Rows, account: Account) -> float:
        """Seconds from now until a list must show this recorded but never seen machine."""
        attempt = next((row for row in rows.attempts if row.number == run.attempt), None)
        if attempt is not None and (attempt.sends > 1 or run.accepted_ago_s is None):
            return attempt.send_by_in_s + account.provision_timeout_s + account.settle_after_s
        return account.settle_after_s - (run.accepted_ago_s or 0.0)

    def _absent(self, life: Life, account: Account, rows: Rows, live: LiveClaim | None) -> bool:
        """Two complete lists of every place, begun late enough, without any machine of the claim."""
        core, claim, now = self._core, life.claim, self._core.clock()
        if life.look_from is None:
            life.look_from = now
        # Seconds from now; below zero once the moment is past. What may be there without an id that a get
        # could be asked for must be missing from two lists that had to show it.
        nameless = [
            attempt.send_by_in_s + account.provision_timeout_s + account.settle_after_s
            for attempt in rows.attempts
            if attempt.outcome is None or attempt.sends > 1
        ]
        first = max([life.look_from, *life.terminated.values(), *(now + wait_s for wait_s in nameless)])
        waits = [self._until_s(run, rows, account) for run in rows.runs if not run.seen and not run.gone]
        regions = {attempt.region for attempt in rows.attempts} | {run.region for run in rows.runs}
        places = core.places(claim, regions | {claim.region})
        later = max([first, *(now + wait_s for wait_s in waits)])
        return places is not None and all(
            core.inventory.absent(claim.uid, place, first_after=first, later_after=later) for place in places
        )

    async def _confirmed(self, life: Life, account: Account, targets: dict[ResourceId, Ref]) -> bool:
        """A get by each recorded id says gone; one that does not is ended again."""
        for resource_id, ref in sorted(targets.items()):
            try:
                machine = await self._core.get(account, ref)
            except ProviderError as error:
                log.info("get failed", resource=resource_id, error=str(error))
                return False
            if machine is not None:
                life.terminated.pop(resource_id, None)
                return False
        return True

    async def _write_remembered(
        self, life: Life, account: Account, rows: Rows, live: LiveClaim | None, epoch: int
    ) -> bool:
        """Write down what only the claim remembers, nothing of it being there any more. False: not yet.

        Of a machine that has its row by now, when its end was asked for; it was looked at like all that have.
        """
        core, claim = self._core, life.claim
        for machine in core.remembered(claim, live):
            if any(run.resource_id == machine.ref.resource_id for run in rows.runs):
                if machine.asked_at is not None:
                    await core.record_remembered(claim, machine, rows, epoch=epoch)
                continue
            try:
                there = await core.get(account, machine.ref)
            except ProviderError as error:
                log.warning(
                    "a machine that the claim remembers cannot be looked at",
                    claim=claim.name,
                    resource=machine.ref.resource_id,
                    error=str(error),
                )
                return False
            if there is None:
                await core.record_remembered(claim, machine, rows, epoch=epoch)
            elif self._is_ours(claim, there.identity):
                return False  # known from now on
        return True

    def _is_ours(self, claim: ClaimSpec, name: str | None) -> bool:
        """Whether this name is of a machine that was made for the claim."""
        identity = parse(name)
        return (
            identity is not None
            and identity.installation == self._core.installation
            and identity.claim_uid == claim.uid
        )

    async def _ended(self, life: Life, refs: list[Ref], epoch: int) -> Release:
        core, claim = self._core, life.claim
        reach("ended.before")
        async with single(core.engine) as conn:
            ended = await rentals.end(conn, claim.uid, epoch=epoch)
        reach("ended.after")
        if not ended:
            life.ending_epoch = None
            return self._again(life, True, Why.NOT_LEADER, "the rental was changed by another replica")
        life.state, life.gone, life.tries = "ended", True, 0
        for ref in refs:
            core.inventory.forget(ref)
        core.inventory.settle(claim.key, claim.uid)
        log.info("released", machines=[ref.resource_id for ref in refs])
        core.notify(claim.uid)
        return Released()

    async def _end_known(
        self, life: Life, why: Why, message: str, *, leave: Collection[ResourceId] = ()
    ) -> Release:
        """Terminate what is known, but for ``leave``, and conclude nothing. Rows hear of it when they can."""
        core, claim = self._core, life.claim
        account = core.accounts.get(claim.key)
        if account is None:
            return self._again(life, False, Why.NO_ACCOUNT, f"provider {claim.provider} is not usable here")
        targets = {known.ref.resource_id: known.ref for known in core.machines(life)}
        if life.ref is not None:
            targets.setdefault(life.ref.resource_id, life.ref)
        if claim.instance is not None and claim.instance.resource_id not in targets:
            targets |= await self._hinted(life, account, NO_ROWS)
        accepted = bool(targets)
        for resource_id, ref in sorted(targets.items()):
            if resource_id in life.terminated:
                continue
            if resource_id in leave or await core.terminate(life, account, ref) is None:
                accepted = False
            else:
                life.terminated[resource_id] = core.clock()
                core.facts.put_nowait(terminate_fact(ref, at=core.clock()))
        return self._again(life, accepted, why, message)

    def _to_end(self, life: Life) -> dict[ResourceId, Known]:
        """Machines that are there, and whose end no cloud has accepted yet."""
        return {
            one.ref.resource_id: one
            for one in self._core.machines(life)
            if one.machine.exists and one.ref.resource_id not in life.terminated
        }

    async def _to_remember(self, life: Life) -> list[Unrecorded]:
        """What is known of each machine that is to be ended; one that no list has shown is asked for."""
        core, claim = self._core, life.claim
        account = core.accounts.get(claim.key)
        named = {ref for ref in (life.ref, claim.instance) if ref is not None}
        for ref in named:
            if account is None or ref.resource_id in life.terminated or core.inventory.known(ref) is not None:
                continue
            try:
                await core.get(account, ref)  # known from now on, if it is ours
            except ProviderError as error:
                log.info("get failed", resource=ref.resource_id, error=str(error))
        account_id = core.account_id(claim)
        told = [_unrecorded(one, account_id=account_id) for one in self._to_end(life).values()]
        fresh = _fresh(life, account_id=account_id)
        if fresh is not None and core.inventory.known(fresh.ref) is None:
            told.append(fresh)
        return told

    def _untold(self, life: Life, told: Collection[Unrecorded]) -> set[ResourceId]:
        """Those of these machines that wait for somebody to take them down; none once that has lasted."""
        now, there = self._core.clock(), {one.ref.resource_id for one in told}
        if life.untold_since is None:
            life.untold_since = now
        if now - life.untold_since < UNTOLD_S:
            return there
        log.error("ended, and neither database nor claim has taken it down", machines=sorted(there))
        return set()

    async def _without_store(self, life: Life, port: ClaimPort, why: Why) -> Release:
        """Teardown goes on from the claim's status; the end waits for the rows.

        What is there is remembered by the claim before it is ended: else, should we die before the database
        is back, or that be an older one, nobody would know that it was ever there. Where neither can take it
        down it waits, but not for long: a machine that runs on, paid for, is worse than a missing row.
        """
        core, claim = self._core, life.claim
        leave: set[ResourceId] = set()
        told = await self._to_remember(life)
        if not told or await core.remember(claim, told, port=port):
            life.untold_since = None
        else:
            leave = self._untold(life, told)
        message = "the store cannot be used: the end waits for it"
        release = await self._end_known(life, why, message, leave=leave)
        if isinstance(release, Releasing) and not release.accepted:
            try:
                live = await port.look(life.claim)
            except ClaimUnreadable:
                return release
            if live is not None and live.mark is None and life.claim.instance is None:
                return self._again(life, True, why, "nothing was ever sent for this claim")
        return release

    def _again(
        self, life: Life, accepted: bool, why: Why, message: str, *, unknown_s: float = 0.0
    ) -> Releasing:
        life.waiting = True
        after_s = self._core.backoff(life)
        return Releasing(accepted=accepted, why=why, message=message, after_s=after_s, unknown_s=unknown_s)


def _unrecorded(known: Known, *, account_id: str | None) -> Unrecorded:
    """A machine that is about to be ended, for the claim to remember. There is no clock but our own."""
    machine = known.machine
    return Unrecorded(
        ref=machine.ref,
        identity=machine.identity or "",
        meters=machine.meters,
        created_at=machine.created_at,
        account_id=account_id,
        shown=True,
        asked_at=datetime.now(UTC),
    )


def _fresh(life: Life, *, account_id: str | None) -> Unrecorded | None:
    """The rental's own machine as its order was answered, for where nobody has shown it yet."""
    ref, quote = life.ref, life.quoted
    if ref is None or quote is None or life.identity is None or ref.resource_id in life.terminated:
        return None
    return Unrecorded(
        ref=ref,
        identity=life.identity,
        meters=quote.meters,
        created_at=quote.created_at,
        account_id=quote.account_id or account_id,
        shown=False,
        asked_at=datetime.now(UTC),
    )
