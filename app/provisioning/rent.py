"""`ensure`: rent exactly one machine for a claim, or say why not. Design section 5, rules 1 to 8.

The order of the steps is the safety: intent, mark, fence, send, record. Between any two of them the process
may die; what is then in the rows and on the claim is enough for the next one to find out what happened.
"""

import asyncio

import structlog

from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.inventory.identity import Identity
from app.inventory.rounds import Known
from app.provisioning.core import Core, meters_json, request_hash
from app.provisioning.lives import Life
from app.provisioning.model import (
    ClaimPort,
    ClaimSpec,
    ClaimUnreadable,
    LiveClaim,
    Mark,
    MarkRefused,
    Outcome,
    Over,
    Policy,
    Refused,
    Rented,
    Waiting,
    Why,
)
from app.provisioning.steps import reach
from app.store import rentals
from app.store.engine import StoreUnavailable, begin
from app.store.rentals import AttemptRow, Rows, RunFacts
from providers.base import (
    Accepted,
    Attempt,
    Offering,
    OutcomeUnknown,
    ProviderError,
    Ref,
    Rejection,
    RejectionKind,
    Throttled,
    Workload,
    usd_per_hour,
)

log = structlog.get_logger()


class Renter:
    """Works on one claim at a time for each claim; different claims run side by side."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def ensure(
        self, claim: ClaimSpec, workload: Workload, *, port: ClaimPort, policy: Policy
    ) -> Outcome:
        core = self._core
        life = core.life(claim)
        if (known := _settled_in_memory(life)) is not None:
            return known
        async with life.renting:
            try:
                return await self._ensure(life, workload, port, policy)
            except StoreUnavailable as error:
                if claim.instance is not None:  # rented before the store went: nothing to rent
                    return Rented(ref=claim.instance)
                return self._wait(life, Why.NO_STORE, str(error))
            except ClaimUnreadable as error:
                return self._wait(life, Why.NO_CLUSTER, str(error))

    async def _ensure(self, life: Life, workload: Workload, port: ClaimPort, policy: Policy) -> Outcome:
        core, claim = self._core, life.claim
        if (known := _settled_in_memory(life)) is not None:
            return known
        epoch = core.epoch()
        if epoch is None:
            if claim.instance is not None:
                return Rented(ref=claim.instance)
            return self._wait(life, Why.NOT_LEADER, "not leading, or the epoch is not in the store yet")
        account = core.accounts.get(claim.key)
        if account is None:
            return self._wait(life, Why.NO_ACCOUNT, f"provider {claim.provider} is not usable here")

        rows = await self._load(claim)
        life.state = rows.state
        if rows.state in ("ending", "ended"):
            return Over()
        if rows.state == "live":
            return self._live(life, rows)
        live = await port.look(claim)
        if live is None or live.deleting:
            return Over()
        rows = await self._believe(life, rows, live, epoch)
        if found := core.inventory.of_claim(claim.uid):  # whatever attempt it is of, late ones included
            return await self._adopt(life, found[0], epoch)
        if rows.unsettled():
            outcome = await self._settle(life, account, rows, workload, live, port, policy, epoch)
            if outcome is not None:
                return outcome
            rows = await self._load(claim)  # every attempt is proven absent: a new one may be made
            if rows.unsettled() or rows.state != "open":
                return self._wait(life, Why.RETRY, "the rows changed meanwhile")
        if rows.attempts and rows.attempts[-1].outcome == "rejected":
            last = rows.attempts[-1]
            kind = RejectionKind(last.rejection or "unsupported")
            return self._refused(life, kind, last.message or "")
        return await self._attempt(life, account, rows, workload, live, port, policy, epoch)

    async def _load(self, claim: ClaimSpec) -> Rows:
        async with begin(self._core.engine) as conn:
            return await rentals.load(conn, claim.uid, provider=claim.provider, account=claim.account)

    def _live(self, life: Life, rows: Rows) -> Outcome:
        claim = life.claim
        assert rows.resource_id is not None  # a check constraint of the table
        life.ref = Ref(
            provider=claim.provider,
            account=claim.account,
            region=rows.resource_region or "",
            resource_id=rows.resource_id,
        )
        known = self._core.inventory.known(life.ref)
        life.machine = known.machine if known else life.machine
        self._core.notify(claim.uid)
        return Rented(ref=life.ref)

    async def _believe(self, life: Life, rows: Rows, live: LiveClaim, epoch: int) -> Rows:
        """Bring rows and mark together (rule 8): an attempt above the mark was never sent; a marked attempt
        that the rows have lost is written down again, unsettled."""
        claim, marked = life.claim, live.mark.sequence if live.mark else 0
        unsent = [attempt for attempt in rows.unsettled() if attempt.sequence > marked]
        lost = live.mark is not None and all(attempt.sequence != marked for attempt in rows.attempts)
        if not unsent and not lost:
            return rows
        if lost:
            await self._core.suspect(marked, f"claim {claim.name}")
        async with begin(self._core.engine) as conn:
            for attempt in unsent:
                await rentals.settle(conn, claim.uid, number=attempt.number, outcome="unsent", epoch=epoch)
            if lost and live.mark is not None:
                await rentals.open_rental(conn, claim.columns(), epoch=epoch)
                await rentals.rebuild_attempt(
                    conn, claim.uid, sequence=marked, send_by=live.mark.send_by, epoch=epoch
                )
        return await self._load(claim)

    async def _adopt(self, life: Life, known: Known, epoch: int) -> Outcome:
        if known.identity.sequence > self._core.recorded_sequence:
            await self._core.suspect(known.identity.sequence, f"machine {known.ref.resource_id}")
        state = await self._core.adopt(life, known, epoch=epoch)
        life.look_from = None
        if state == "live" and life.ref is not None:
            return Rented(ref=life.ref)
        return Over() if state in ("ending", "ended") else self._wait(life, Why.RETRY, "not adopted")

    # --- an attempt of our own ---

    async def _attempt(
        self,
        life: Life,
        account: Account,
        rows: Rows,
        workload: Workload,
        live: LiveClaim,
        port: ClaimPort,
        policy: Policy,
        epoch: int,
    ) -> Outcome:
        core, claim = self._core, life.claim
        if (why := account.provider.validate(workload)) is not None:
            return self._refused(life, RejectionKind.UNSUPPORTED, why)
        offering = self._offering(claim)
        if offering is None:
            return self._wait(life, Why.RETRY, f"{claim.provider} does not offer this shape at the moment")
        meters = account.provider.quote(workload, offering)
        price = usd_per_hour(meters)
        if claim.max_price is not None and (price is None or price > claim.max_price):
            shown = "unknown" if price is None else f"${price}/h"
            message = f"price {shown}, at most ${claim.max_price}/h"
            return self._refused(life, RejectionKind.PRICE, message)
        number = rows.attempts[-1].number + 1 if rows.attempts else 1
        sequence = rows.next_sequence
        floor = max(core.inventory.highest_sequence, live.mark.sequence if live.mark else 0)
        if sequence <= floor:
            async with begin(core.engine) as conn:
                sequence = await rentals.sequence_above(conn, floor)
        identity = Identity(
            installation=core.installation, claim_uid=claim.uid, attempt=number, sequence=sequence
        )
        ceiling = claim.max_price if claim.max_price is not None else price
        digest = request_hash(claim, workload, offering, avoid=rows.avoid_hosts, ceiling=ceiling)

        began = core.clock()  # before the insert is sent: send_by is later than began + window for certain
        reach("intent.before")
        async with begin(core.engine) as conn:
            send_by = await rentals.intend(
                conn,
                claim.columns(),
                epoch=epoch,
                number=number,
                sequence=sequence,
                identity=str(identity),
                request_hash=digest,
                shape=offering.shape,
                ceiling=ceiling,
                window_s=core.settings.send_window_s,
            )
        reach("intent.after")
        if send_by is None:
            return self._wait(life, Why.RETRY, "the rental changed, or another replica leads")
        core.recorded_sequence = max(core.recorded_sequence, sequence)
        attempt = Attempt(
            claim_uid=claim.uid,
            number=number,
            sequence=sequence,
            identity=str(identity),
            token=identity.token,
            account=claim.account,
            region=claim.region,
            tier=claim.tier,
            ceiling_usd_per_hour=ceiling,
            options=claim.options,
        )
        mark = Mark(sequence=sequence, send_by=send_by)
        if not await self._mark(life, port, mark, live):
            await self._unsent(claim, attempt, epoch)
            return self._wait(life, Why.RETRY, "the claim changed before it was marked")
        if not await self._may_send(life, account, attempt, began, epoch):
            await self._unsent(claim, attempt, epoch)
            return self._wait(life, Why.RETRY, "too late to send, or no longer allowed")
        return await self._send(
            life, account, attempt, workload, offering, rows.avoid_hosts, policy, epoch, first=True
        )

    def _offering(self, claim: ClaimSpec) -> Offering | None:
        offers = self._core.offerings.get(*claim.key)
        found = offers.find(claim.accelerator, tier=claim.tier, region=claim.region) if offers else ()
        return found[0] if found else None

    async def _mark(self, life: Life, port: ClaimPort, mark: Mark, live: LiveClaim) -> bool:
        reach("mark.before")
        try:
            await port.mark(life.claim, mark, live=live)
        except MarkRefused:
            return False
        reach("mark.after")
        return True

    async def _may_send(
        self, life: Life, account: Account, attempt: Attempt, began: float, epoch: int
    ) -> bool:
        """The fence, right before the send and after every wait."""
        core = self._core
        await account.budget.take(Urgency.RENT)
        reach("fence.before")
        async with begin(core.engine) as conn:
            allowed = await rentals.fence(conn, life.claim.uid, number=attempt.number, epoch=epoch)
        reach("fence.after")
        in_time = core.clock() < began + core.settings.send_window_s
        return allowed and in_time and core.epoch() == epoch

    async def _unsent(self, claim: ClaimSpec, attempt: Attempt, epoch: int) -> None:
        """Only the coroutine that would have sent it may say so."""
        async with begin(self._core.engine) as conn:
            await rentals.settle(conn, claim.uid, number=attempt.number, outcome="unsent", epoch=epoch)

    async def _send(
        self,
        life: Life,
        account: Account,
        attempt: Attempt,
        workload: Workload,
        offering: Offering,
        avoid: frozenset[str],
        policy: Policy,
        epoch: int,
        *,
        first: bool,
    ) -> Outcome:
        core = self._core
        core.inventory.stir(account.key, attempt.claim_uid)
        try:
            async with asyncio.timeout(account.provision_timeout_s):
                answer = await account.provider.provision(
                    attempt, workload, offering=offering, access=None, avoid=avoid
                )
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            if not first:
                return self._unknown(life, attempt, str(error), 0.0)
            async with begin(core.engine) as conn:
                await rentals.settle(
                    conn,
                    attempt.claim_uid,
                    number=attempt.number,
                    outcome="throttled",
                    epoch=epoch,
                    message=str(error),
                )
            return Waiting(why=Why.THROTTLED, message=str(error), after_s=max(error.retry_after_s, 0.05))
        except (OutcomeUnknown, ProviderError, TimeoutError) as error:
            return self._unknown(life, attempt, str(error) or type(error).__name__, 0.0)
        except Exception as error:  # an adapter's defect proves nothing about the cloud
            log.exception("provision raised")
            return self._unknown(life, attempt, type(error).__name__, 0.0)
        reach("send.after")
        if isinstance(answer, Rejection):
            if not first:  # no rejection after an Unknown settles anything
                return self._unknown(life, attempt, answer.message, 0.0)
            return await self._rejected(life, attempt, answer, policy, epoch)
        return await self._accepted(life, attempt, answer, policy, epoch)

    async def _accepted(
        self, life: Life, attempt: Attempt, answer: Accepted, policy: Policy, epoch: int
    ) -> Outcome:
        core, claim = self._core, life.claim
        facts = RunFacts(
            attempt=attempt.number,
            resource_id=answer.ref.resource_id,
            region=answer.ref.region,
            account_id=answer.account_id or core.account_id(claim),
            meters=meters_json(answer.meters),
            usd_per_hour=usd_per_hour(answer.meters),
            accepted=True,
            seen=False,
            provider_created_at=answer.created_at,
            clock_offset_s=answer.clock_offset_s,
        )
        async with begin(core.engine) as conn:
            state, main = await rentals.record(conn, claim.columns(), facts, outcome="accepted", epoch=epoch)
        reach("record.after")
        life.state, life.tries, life.waiting = state, 0, False
        if core.recorded_accounts is not None and facts.account_id:
            core.recorded_accounts[claim.key] = facts.account_id
        log.info("machine rented", resource=answer.ref.resource_id, region=answer.ref.region, state=state)
        if state == "live" and main == answer.ref.resource_id:
            life.ref, life.identity, life.quoted = answer.ref, attempt.identity, answer
            life.reserved, life.rented_at = answer.reserved, core.clock()
            core.notify(claim.uid)
            if (unfit := _unfit(claim, answer)) is not None:
                return await self._send_back(life, unfit, policy, epoch)
            return Rented(ref=answer.ref)
        if state == "live":
            return Waiting(why=Why.RETRY, message="another machine was recorded first", after_s=0.05)
        return Over() if state in ("ending", "ended") else self._unknown(life, attempt, "not recorded", 0.0)

    async def _send_back(self, life: Life, unfit: Rejection, policy: Policy, epoch: int) -> Outcome:
        """The machine is recorded, but not what was asked for: release it, and count it as a refusal."""
        columns = life.claim.columns()
        async with begin(self._core.engine) as conn:
            life.state = await rentals.begin_ending(conn, columns, reason=unfit.kind.value, epoch=epoch)
            if unfit.scope is not None:
                await rentals.block(
                    conn,
                    columns,
                    unfit.scope,
                    template=None,
                    kind=unfit.kind.value,
                    message=unfit.message,
                    ttl_s=policy.block_ttl_s,
                )
        log.info("rented, but unfit", kind=unfit.kind.value, message=unfit.message)
        return self._refused(life, unfit.kind, unfit.message)

    async def _rejected(
        self, life: Life, attempt: Attempt, answer: Rejection, policy: Policy, epoch: int
    ) -> Outcome:
        core, claim = self._core, life.claim
        template = policy.template if answer.kind is RejectionKind.INVALID else None
        async with begin(core.engine) as conn:
            closed = await rentals.settle(
                conn,
                claim.uid,
                number=attempt.number,
                outcome="rejected",
                epoch=epoch,
                rejection=answer.kind.value,
                message=answer.message,
            )
            if closed and (answer.scope is not None or template is not None):
                await rentals.block(
                    conn,
                    claim.columns(),
                    answer.scope,
                    template=template,
                    kind=answer.kind.value,
                    message=answer.message,
                    ttl_s=policy.block_ttl_s,
                )
        if not closed:
            return self._wait(life, Why.RETRY, "the attempt was settled by another replica")
        core.inventory.settle(claim.key, claim.uid)
        log.info("rejected", kind=answer.kind.value, message=answer.message)
        return self._refused(life, answer.kind, answer.message)

    # --- attempts that may have been sent ---

    async def _settle(
        self,
        life: Life,
        account: Account,
        rows: Rows,
        workload: Workload,
        live: LiveClaim,
        port: ClaimPort,
        policy: Policy,
        epoch: int,
    ) -> Outcome | None:
        """Look for what unsettled attempts may have made. None: all are proven absent and written so."""
        core, claim = self._core, life.claim
        now = core.clock()
        core.inventory.stir(claim.key, claim.uid)
        if life.look_from is None:
            life.look_from = now
        pending = rows.unsettled()
        regions = {attempt.region for attempt in rows.attempts} | {claim.region}
        places = core.places(claim, regions)
        later = now + max(_lasts_s(attempt, account) for attempt in pending)
        if places is not None and all(
            core.inventory.absent(claim.uid, place, first_after=life.look_from, later_after=later)
            for place in places
        ):
            async with begin(core.engine) as conn:
                for attempt in pending:
                    await rentals.settle(
                        conn, claim.uid, number=attempt.number, outcome="absent", epoch=epoch
                    )
            log.info("no machine came of it", attempts=[attempt.number for attempt in pending])
            life.look_from, life.tries, life.waiting = None, 0, False
            return None
        if len(pending) == 1 and pending[0].identity is not None:
            outcome = await self._replay(life, account, rows, workload, live, port, policy, epoch)
            if outcome is not None:
                return outcome
        return self._unknown(life, None, "looking for what an unanswered request made", _oldest_s(pending))

    async def _replay(
        self,
        life: Life,
        account: Account,
        rows: Rows,
        workload: Workload,
        live: LiveClaim,
        port: ClaimPort,
        policy: Policy,
        epoch: int,
    ) -> Outcome | None:
        """Send the same attempt again where the cloud promises that this cannot make a second machine."""
        core, claim, row = self._core, life.claim, rows.unsettled()[0]
        offering = self._offering(claim)
        if account.traits.replay_for_s is None or offering is None or row.identity is None:
            return None
        began = core.clock()
        async with begin(core.engine) as conn:
            send_by = await rentals.replay(
                conn,
                claim.uid,
                number=row.number,
                request_hash=request_hash(
                    claim, workload, offering, avoid=rows.avoid_hosts, ceiling=row.ceiling_usd_per_hour
                ),
                epoch=epoch,
                window_s=core.settings.send_window_s,
                effect_s=account.provision_timeout_s,
                replay_for_s=account.traits.replay_for_s,
            )
        if send_by is None:
            return None
        attempt = Attempt(
            claim_uid=claim.uid,
            number=row.number,
            sequence=row.sequence,
            identity=row.identity,
            token=row.identity,
            account=claim.account,
            region=claim.region,
            tier=claim.tier,
            ceiling_usd_per_hour=row.ceiling_usd_per_hour,
            options=claim.options,
        )
        mark = Mark(sequence=row.sequence, send_by=send_by)
        if not await self._mark(life, port, mark, live):
            return None
        if not await self._may_send(life, account, attempt, began, epoch):
            return None
        log.info("replay", attempt=row.number, sends=row.sends + 1)
        return await self._send(
            life, account, attempt, workload, offering, rows.avoid_hosts, policy, epoch, first=False
        )

    # --- answers ---

    def _refused(self, life: Life, kind: RejectionKind, message: str) -> Refused:
        refusal = Refused(kind=kind, message=message)
        if life.refusal != refusal:
            life.refusal = refusal
            self._core.notify(life.claim.uid)
        return refusal

    def _unknown(self, life: Life, attempt: Attempt | None, message: str, for_s: float) -> Waiting:
        life.waiting = True
        if attempt is not None:
            log.warning("outcome unknown", attempt=attempt.number, error=message)
        return Waiting(why=Why.UNKNOWN, message=message, after_s=self._core.backoff(life), for_s=for_s)

    def _wait(self, life: Life, why: Why, message: str) -> Waiting:
        return Waiting(why=why, message=message, after_s=self._core.backoff(life))


def _unfit(claim: ClaimSpec, answer: Accepted) -> Rejection | None:
    """Why an accepted machine must go back at once: the adapter says so, or it is dearer than the ceiling."""
    if answer.unfit is not None:
        return answer.unfit
    price = usd_per_hour(answer.meters)
    if claim.max_price is not None and price is not None and price > claim.max_price:
        message = f"rented at ${price}/h, at most ${claim.max_price}/h"
        return Rejection(kind=RejectionKind.PRICE, message=message)
    return None


def _settled_in_memory(life: Life) -> Outcome | None:
    if life.state in ("ending", "ended"):
        return Over()
    if life.state == "live" and life.ref is not None:
        return Rented(ref=life.ref)
    return None


def _lasts_s(attempt: AttemptRow, account: Account) -> float:
    """Seconds from now until a complete list must show what this attempt made, if it made anything."""
    return attempt.send_by_in_s + account.provision_timeout_s + account.settle_after_s


def _oldest_s(attempts: tuple[AttemptRow, ...]) -> float:
    return max((attempt.age_s for attempt in attempts), default=0.0)
