"""`ensure`: rent exactly one machine for a claim, or say why not. Design section 5, rules 1 to 8.

The order of the steps is the safety: intent, mark, fence, send, record. Between any two of them the process
may die; what is then in the rows and on the claim is enough for the next one to find out what happened.
"""

import asyncio
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.api.quantities import usd
from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.inventory.fitness import refuses
from app.inventory.identity import Identity, parse
from app.inventory.rounds import Known
from app.machines.keys import access
from app.provisioning.core import Core, request_hash
from app.provisioning.lives import Life
from app.provisioning.memory import meters_json
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
    Unrecorded,
    Waiting,
    Why,
)
from app.provisioning.prepare import no_room, offering_of, pins_of
from app.provisioning.steps import reach
from app.store import blocks, rentals
from app.store.engine import StoreUnavailable, begin, single
from app.store.rentals import AttemptRow, Rows, RunFacts, RunRow
from providers.base import (
    Accepted,
    Attempt,
    BlockScope,
    Offering,
    ProviderError,
    Ref,
    Rejection,
    RejectionKind,
    Throttled,
    Workload,
    usd_per_hour,
)
from providers.capabilities import Prepares

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one call of `ensure` works with. ``live`` is the claim as read after ``epoch`` was known.

    ``workload`` None: the caller cannot say what to run at the moment, so nothing is sent. ``account_id`` is
    the cloud's own id of the account that all was judged by: a new credential may bring another meanwhile.
    """

    life: Life
    account: Account
    account_id: str
    workload: Workload | None
    live: LiveClaim
    port: ClaimPort
    policy: Policy
    epoch: int

    @property
    def claim(self) -> ClaimSpec:
        return self.life.claim


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """One send: the attempt as written, and the rest of the exact request."""

    attempt: Attempt
    workload: Workload
    offering: Offering
    avoid: frozenset[str]
    first: bool


class Renter:
    """Works on one claim at a time for each claim; different claims run side by side."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def ensure(
        self, claim: ClaimSpec, workload: Workload | None, *, port: ClaimPort, policy: Policy
    ) -> Outcome:
        life = self._core.life(claim)
        if (known := _decided(life)) is not None:
            return known
        async with life.renting:
            try:
                return await self._ensure(life, workload, port, policy)
            # Even for a machine on the claim's status: the rows may lack it.
            except StoreUnavailable as error:
                return self._wait(life, Why.NO_STORE, str(error))
            except ClaimUnreadable as error:
                return self._wait(life, Why.NO_CLUSTER, str(error))
            except DBAPIError as error:  # a constraint stood in the way of a race: nothing was written
                log.warning("the store refused", error=str(error.orig))
                return self._wait(life, Why.RETRY, "the store refused a row")

    async def _ensure(
        self, life: Life, workload: Workload | None, port: ClaimPort, policy: Policy
    ) -> Outcome:
        core, claim = self._core, life.claim
        if (known := _decided(life)) is not None:
            return known
        epoch = core.epoch()
        if epoch is None:
            return self._wait(life, Why.NOT_LEADER, "not leading, or the epoch is not in the store yet")
        account = core.accounts.get(claim.key)
        if account is None:
            return self._wait(life, Why.NO_ACCOUNT, f"provider {claim.provider} is not usable here")
        if (wrong := core.wrong_account(account)) is not None:
            return self._wait(life, Why.NO_ACCOUNT, wrong)

        rows = await core.load(claim)
        life.state, life.intending = rows.state, False
        if rows.state in ("ending", "ended"):
            return Over()
        if rows.state == "live":
            return await self._live(life, rows, policy, epoch)
        live = await port.look(claim)
        if live is None or live.deleting:
            return Over()
        call = _Call(
            life=life,
            account=account,
            account_id=account.account_id,
            workload=workload,
            live=live,
            port=port,
            policy=policy,
            epoch=epoch,
        )
        rows = await core.believe(claim, rows, live, epoch=epoch)
        if (wrong := core.marked_elsewhere(account, rows, live)) is not None:
            return self._wait(life, Why.NO_ACCOUNT, wrong)
        if claim.instance is not None and not await self._looked_at(account, claim.instance):
            return self._wait(life, Why.RETRY, "the machine on the claim's status cannot be looked at")
        if rows.attempts and not await core.recall(life, account):
            return self._wait(life, Why.RETRY, "what was shown for the claim before cannot be looked at")
        if found := core.machines(life):  # whatever attempt it is of, late ones included
            return await self._adopt(call, found[0])
        if run := next((run for run in rows.runs if not run.gone), None):
            return await self._take_up(call, run)
        if rows.unsettled():
            outcome = await self._settle(call, rows)
            if outcome is not None:
                return outcome
            rows = await core.load(claim)  # every attempt is proven absent: a new one may be made
            if rows.unsettled() or rows.state != "open":
                return self._wait(life, Why.RETRY, "the rows changed meanwhile")
        if rows.attempts and rows.attempts[-1].outcome == "rejected":
            last = rows.attempts[-1]
            return self._refused(life, RejectionKind(last.rejection or "unsupported"), last.message or "")
        if claim.instance is not None:
            return await self._over(life, epoch)
        return await self._attempt(call, rows)

    async def _live(self, life: Life, rows: Rows, policy: Policy, epoch: int) -> Outcome:
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
        price = next((run.usd_per_hour for run in rows.runs if run.resource_id == rows.resource_id), None)
        return await self._within_ceiling(life, price, policy, epoch)

    async def _within_ceiling(self, life: Life, price: Decimal | None, policy: Policy, epoch: int) -> Outcome:
        """The recorded machine, unless it turned out dearer than the claim allows: then it goes back."""
        assert life.ref is not None
        dear = _dear(life.claim, price)
        if dear is None:
            life.judged = True
            return Rented(ref=life.ref)
        async with begin(self._core.engine) as conn:
            return await self._send_back(conn, life, dear, policy, epoch)

    async def _take_up(self, call: _Call, run: RunRow) -> Outcome:
        """A machine is written down, but not as the rental's: its create was answered to a former leader."""
        life, claim = call.life, call.claim
        async with begin(self._core.engine) as conn:
            taken = await rentals.make_live(
                conn, claim.uid, resource_id=run.resource_id, region=run.region, epoch=call.epoch
            )
        if not taken:
            return self._wait(life, Why.RETRY, "the rows changed meanwhile")
        log.info("machine taken up", resource=run.resource_id)
        return await self._live(life, await self._core.load(claim), call.policy, call.epoch)

    async def _looked_at(self, account: Account, instance: Ref) -> bool:
        """Ask for a machine that the claim's status names and the rows do not; False: no answer.

        The inventory learns of what is shown, and believes nothing but its identity.
        """
        try:
            await self._core.get(account, instance)
        except ProviderError as error:
            log.info("get failed", resource=instance.resource_id, error=str(error))
            return False
        return True

    async def _over(self, life: Life, epoch: int) -> Outcome:
        """The claim had its machine, as its status tells, and it is proven gone: no second one (rule 1)."""
        async with begin(self._core.engine) as conn:
            life.state = await rentals.begin_ending(
                conn, life.claim.columns(), reason="machine gone", epoch=epoch
            )
        self._core.notify(life.claim.uid)
        return Over() if life.state else self._wait(life, Why.NOT_LEADER, "another replica leads")

    async def _adopt(self, call: _Call, known: Known) -> Outcome:
        core, life = self._core, call.life
        await core.verify(
            call.claim.uid,
            known.identity.sequence,
            shown_by=f"machine {known.ref.resource_id}",
            epoch=call.epoch,
        )
        main = await core.adopt(life, known, epoch=call.epoch)
        life.look_from = None
        if main and life.state == "live":
            price = usd_per_hour(known.machine.meters)
            return await self._within_ceiling(life, price, call.policy, call.epoch)
        if life.state in ("ending", "ended"):
            return Over()
        return self._wait(life, Why.RETRY, "not adopted")

    # --- an attempt of our own ---

    async def _attempt(self, call: _Call, rows: Rows) -> Outcome:
        core, claim, life, workload = self._core, call.claim, call.life, call.workload
        if workload is None:
            return self._wait(life, Why.NO_WORKLOAD, "what to run is not known")
        if (why := refuses(call.account.provider, workload)) is not None:
            return await self._refuse_unsent(call, RejectionKind.UNSUPPORTED, workload.masked(why))
        offering = self._offering(call)
        if offering is None:
            if (cramped := no_room(core.offerings.get(*claim.key), claim, workload)) is not None:
                return await self._refuse_unsent(call, RejectionKind.UNSUPPORTED, cramped)
            return self._wait(life, Why.RETRY, f"{claim.provider} does not offer this shape at the moment")
        price = usd_per_hour(call.account.provider.quote(workload, offering))
        if claim.max_price is not None and (price is None or price > claim.max_price):
            shown = "its price is not known" if price is None else f"{usd(price)} an hour"
            message = f"{shown}, at most {usd(claim.max_price)} an hour"
            return await self._refuse_unsent(call, RejectionKind.PRICE, message)
        pins = await self._prepared(call, workload, offering, rows)
        if isinstance(pins, Waiting | Refused):
            return pins
        number = rows.attempts[-1].number + 1 if rows.attempts else 1
        marked = call.live.mark.sequence if call.live.mark else 0
        floor = max(core.inventory.highest_sequence, core.highest_mark, marked)
        sequence = await core.next_sequence(above=floor)
        identity = Identity(
            installation=core.installation, claim_uid=claim.uid, attempt=number, sequence=sequence
        )
        if parse(str(identity)) != identity:  # a machine whose name we cannot read would be lost
            return self._wait(life, Why.RETRY, f"attempt {number} cannot be named any more: delete the Pod")
        ceiling = claim.max_price if claim.max_price is not None else price

        await call.account.budget.take(Urgency.RENT)  # before the intent: waiting must not use up its time
        began = core.clock()  # before the insert is sent: send_by is later than began + window for certain
        # The answer may get lost, and the claim be gone by then; without one there may be no row either.
        life.intending = life.state is None
        life.state = life.state or "open"
        reach("intent.before")
        async with single(core.engine) as conn:
            send_by = await rentals.intend(
                conn,
                claim.columns(),
                epoch=call.epoch,
                number=number,
                sequence=sequence,
                identity=str(identity),
                request_hash=request_hash(claim, workload, offering, avoid=rows.avoid_hosts, ceiling=ceiling),
                shape=offering.shape,
                ceiling=ceiling,
                window_s=core.settings.send_window_s,
            )
        reach("intent.after")
        if send_by is None:
            return self._wait(life, Why.RETRY, "the rental changed, or another replica leads")
        life.intending = False
        core.written.setdefault(claim.uid, set()).add(sequence)
        if number == 1 and not marked:  # nothing was ever sent for it, so no earlier round can have shown it
            life.recalled = True
        attempt = _attempt_of(
            claim, number=number, sequence=sequence, identity=str(identity), ceiling=ceiling, pins=pins
        )
        if not await self._mark(call, sequence, send_by):
            # Not closed: the next call holds it against the mark that is there. In a store that was restored
            # meanwhile, that mark may be of an attempt with this very number, which another leader has sent.
            return self._wait(life, Why.RETRY, "the claim changed before it was marked")
        if not await self._may_send(call, attempt, began):
            await self._unsent(call, attempt)
            return self._wait(life, Why.RETRY, "too late to send, or no longer allowed")
        order = _Order(
            attempt=attempt, workload=workload, offering=offering, avoid=rows.avoid_hosts, first=True
        )
        return await self._send(call, order)

    def _offering(self, call: _Call) -> Offering | None:
        offers = self._core.offerings.get(*call.claim.key)
        return offering_of(offers, call.claim, account=call.account, workload=call.workload)

    async def _prepared(
        self, call: _Call, workload: Workload, offering: Offering, rows: Rows
    ) -> Mapping[str, str] | Waiting | Refused:
        """The attempt's pins, or why there is none."""
        hide, account = workload.masked, call.account
        try:
            pins = await pins_of(call.claim, workload, offering, account=account, avoid=rows.avoid_hosts)
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            after_s = max(error.retry_after_s, self._core.backoff(call.life))
            return Waiting(why=Why.THROTTLED, message=hide(str(error)), after_s=after_s)
        except (ProviderError, TimeoutError) as error:
            return self._wait(call.life, Why.RETRY, hide(str(error)) or "the cloud did not answer in time")
        if not isinstance(pins, Rejection):
            return pins
        return await self._refuse_unsent(call, pins.kind, hide(pins.message), scope=pins.scope)

    async def _mark(self, call: _Call, sequence: int, send_by: datetime) -> bool:
        mark = Mark(sequence=sequence, send_by=send_by, account_id=call.account_id)
        reach("mark.before")
        try:
            await call.port.mark(call.claim, mark, live=call.live)
        except MarkRefused:
            return False
        reach("mark.after")
        return True

    async def _may_send(self, call: _Call, attempt: Attempt, began: float) -> bool:
        """The fence, right before the send and after every wait."""
        core = self._core
        reach("fence.before")
        allowed = await core.fence(call.claim.uid, number=attempt.number, epoch=call.epoch)
        reach("fence.after")
        in_time = core.clock() < began + core.settings.send_window_s
        marked = call.account.account_id == call.account_id  # or the machine would be looked for elsewhere
        return allowed and in_time and marked and core.epoch() == call.epoch

    async def _unsent(self, call: _Call, attempt: Attempt) -> None:
        """Only the coroutine that would have sent it may say so."""
        await self._close(call, attempt, outcome="unsent")

    async def _close(
        self, call: _Call, attempt: Attempt, *, outcome: str, message: str | None = None
    ) -> bool:
        async with single(self._core.engine) as conn:
            return await rentals.settle(
                conn,
                call.claim.uid,
                number=attempt.number,
                outcome=outcome,
                epoch=call.epoch,
                message=message,
            )

    async def _send(self, call: _Call, order: _Order) -> Outcome:
        core, attempt, account = self._core, order.attempt, call.account
        hide = order.workload.masked  # what a cloud says may quote from what it was sent
        core.inventory.stir(account.key, attempt.claim_uid)
        try:
            async with asyncio.timeout(account.provision_timeout_s):
                answer = await account.provider.provision(
                    attempt,
                    order.workload,
                    offering=order.offering,
                    access=access(account.machine_secret, attempt.identity),
                    avoid=order.avoid,
                )
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            message = hide(str(error))
            if not order.first:
                return self._unknown(call.life, attempt, message)
            await self._close(call, attempt, outcome="throttled", message=message)
            after_s = max(error.retry_after_s, core.backoff(call.life))
            return Waiting(why=Why.THROTTLED, message=message, after_s=after_s)
        except (ProviderError, TimeoutError) as error:
            return self._unknown(call.life, attempt, hide(str(error)) or type(error).__name__)
        except Exception as error:  # an adapter's defect proves nothing about the cloud
            log.error("provision raised", trace=hide(traceback.format_exc()))
            return self._unknown(call.life, attempt, type(error).__name__)
        reach("send.after")
        answer = _hidden(answer, hide)
        if isinstance(answer, Accepted):
            return await self._accepted(call, attempt, answer)
        if not order.first:  # no rejection after an Unknown settles anything
            return self._unknown(call.life, attempt, answer.message)
        return await self._rejected(call, attempt, answer)

    async def _accepted(self, call: _Call, attempt: Attempt, answer: Accepted) -> Outcome:
        core, claim, life = self._core, call.claim, call.life
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
        unfit = answer.unfit or _dear(claim, facts.usd_per_hour)
        sent_back: Outcome | None = None
        # Recorded and sent back together, or neither.
        transaction = begin if unfit is not None else single
        try:
            async with transaction(core.engine) as conn:
                state, main = await rentals.record(
                    conn, claim.columns(), facts, outcome="accepted", epoch=call.epoch
                )
                ours = state == "live" and main == answer.ref.resource_id
                if ours and unfit is not None:
                    sent_back = await self._send_back(conn, life, unfit, call.policy, call.epoch)
        except StoreUnavailable:  # should we die before it is back, and the machine end by itself
            await core.remember(claim, [_unrecorded(attempt, answer, facts)], port=call.port)
            raise
        reach("record.after")
        life.state, life.tries, life.waiting = ("ending" if sent_back else state), 0, False
        core.note_account(claim.key, facts.account_id)
        log.info(
            "machine rented", resource=answer.ref.resource_id, region=answer.ref.region, state=life.state
        )
        if ours:
            life.ref, life.identity, life.quoted = answer.ref, attempt.identity, answer
            life.reserved, life.rented_at, life.judged = answer.reserved, core.clock(), True
            core.notify(claim.uid)
            return sent_back or Rented(ref=answer.ref)
        if state == "live":
            return Waiting(why=Why.RETRY, message="another machine was recorded first", after_s=0.05)
        return Over() if state in ("ending", "ended") else self._unknown(life, attempt, "not recorded")

    async def _send_back(
        self, conn: AsyncConnection, life: Life, unfit: Rejection, policy: Policy, epoch: int
    ) -> Outcome:
        """The machine is recorded, but not what was asked for: release it, and count it as a refusal."""
        columns = life.claim.columns()
        if await rentals.begin_ending(conn, columns, reason=unfit.kind.value, epoch=epoch) is None:
            return self._wait(life, Why.NOT_LEADER, "another replica leads")
        await self._block(conn, life.claim, unfit, ttl_s=policy.block_ttl_s, template=None)
        life.state = "ending"
        log.info("rented, but unfit", kind=unfit.kind.value, message=unfit.message)
        return self._refused(life, unfit.kind, unfit.message)

    async def _rejected(self, call: _Call, attempt: Attempt, answer: Rejection) -> Outcome:
        core, claim = self._core, call.claim
        template = call.policy.template if answer.kind is RejectionKind.INVALID else None
        one_host = _names_only_a_host(answer.scope)
        async with begin(core.engine) as conn:
            closed = await rentals.settle(
                conn,
                claim.uid,
                number=attempt.number,
                outcome="avoided" if one_host else "rejected",
                epoch=call.epoch,
                rejection=answer.kind.value,
                message=answer.message,
            )
            if closed:
                ttl_s = call.policy.block_ttl_s
                await self._block(conn, claim, answer, ttl_s=ttl_s, template=template)
        if not closed:
            return self._wait(call.life, Why.RETRY, "the attempt was settled by another replica")
        log.info("rejected", kind=answer.kind.value, message=answer.message, one_host=one_host)
        if one_host:  # the offering is still good: the next attempt avoids the host
            return self._wait(call.life, Why.RETRY, answer.message)
        core.inventory.settle(claim.key, claim.uid)
        return self._refused(call.life, answer.kind, answer.message)

    async def _refuse_unsent(
        self, call: _Call, kind: RejectionKind, message: str, *, scope: BlockScope | None = None
    ) -> Refused:
        """Refused before anything is sent. Without a scope it blocks this template alone, whose next Pod
        would else be made, placed here and refused at once, for ever."""
        answer = Rejection(kind=kind, message=message, scope=scope)
        template = call.policy.template if scope is None else None
        async with begin(self._core.engine) as conn:
            await self._block(conn, call.claim, answer, ttl_s=call.policy.block_ttl_s, template=template)
        return self._refused(call.life, kind, message)

    async def _block(
        self,
        conn: AsyncConnection,
        claim: ClaimSpec,
        answer: Rejection,
        *,
        ttl_s: float,
        template: str | None,
    ) -> None:
        """Note what was refused, as narrowly as it is true; nothing for a refusal that names no offering."""
        scope = answer.scope
        if scope is None and template is None:
            return
        await blocks.record(
            conn,
            blocks.Scope(
                provider=claim.provider,
                account=claim.account,
                accelerator=scope.accelerator if scope else None,
                tier=scope.tier.value if scope and scope.tier else None,
                region=scope.region if scope else None,
                host=scope.host if scope else None,
                template=template,
                everything=bool(scope and scope.everything),
            ),
            blocks.Cause(
                kind=answer.kind.value,
                message=answer.message,
                pool=claim.pool,
                pod_namespace=claim.pod_namespace,
                pod_name=claim.pod_name,
                claim_uid=claim.uid,
            ),
            ttl_s=ttl_s,
        )

    # --- attempts that may have been sent ---

    async def _settle(self, call: _Call, rows: Rows) -> Outcome | None:
        """Look for what unsettled attempts may have made. None: all are proven absent and written so."""
        core, claim, life = self._core, call.claim, call.life
        now = core.clock()
        core.inventory.stir(claim.key, claim.uid)
        if life.look_from is None:
            life.look_from = now
        pending = rows.unsettled()
        regions = {attempt.region for attempt in rows.attempts} | {claim.region}
        places = core.places(claim, regions)
        # Both lists, not the later one alone: a list may leave out, once, what the one before it was too
        # early to show.
        since = max(life.look_from, now + max(_lasts_s(attempt, call.account) for attempt in pending))
        if places is not None and all(
            core.inventory.absent(claim.uid, place, first_after=since, later_after=since) for place in places
        ):
            if (doubt := core.doubt(claim, places, rows)) is not None:
                return self._unknown(life, None, doubt, for_s=max(attempt.age_s for attempt in pending))
            async with begin(core.engine) as conn:
                for attempt in pending:
                    await rentals.settle(
                        conn, claim.uid, number=attempt.number, outcome="absent", epoch=call.epoch
                    )
            log.info("no machine came of it", attempts=[attempt.number for attempt in pending])
            life.look_from, life.tries, life.waiting = None, 0, False
            return None
        if len(pending) == 1 and (outcome := await self._replay(call, rows, pending[0])) is not None:
            return outcome
        oldest_s = max(attempt.age_s for attempt in pending)
        return self._unknown(life, None, "looking for what an unanswered request made", for_s=oldest_s)

    async def _replay(self, call: _Call, rows: Rows, row: AttemptRow) -> Outcome | None:
        """Send the same attempt again where the cloud promises that this cannot make a second machine."""
        core, claim, workload = self._core, call.claim, call.workload
        offering, replay_for_s = self._offering(call), call.account.traits.replay_for_s
        if workload is None or replay_for_s is None or offering is None or row.identity is None:
            return None
        if isinstance(call.account.provider, Prepares):
            return None  # what was pinned is not on record, and other bytes would be another order
        ceiling = row.ceiling_usd_per_hour
        await call.account.budget.take(Urgency.RENT)
        began = core.clock()
        async with begin(core.engine) as conn:
            send_by = await rentals.replay(
                conn,
                claim.uid,
                number=row.number,
                request_hash=request_hash(claim, workload, offering, avoid=rows.avoid_hosts, ceiling=ceiling),
                epoch=call.epoch,
                window_s=core.settings.send_window_s,
                effect_s=call.account.provision_timeout_s,
                replay_for_s=replay_for_s,
            )
        if send_by is None:
            return None
        attempt = _attempt_of(
            claim, number=row.number, sequence=row.sequence, identity=row.identity, ceiling=ceiling
        )
        if not await self._mark(call, row.sequence, send_by):
            return None
        if not await self._may_send(call, attempt, began):
            return None
        log.info("replay", attempt=row.number, sends=row.sends + 1)
        order = _Order(
            attempt=attempt, workload=workload, offering=offering, avoid=rows.avoid_hosts, first=False
        )
        return await self._send(call, order)

    # --- answers ---

    def _unknown(self, life: Life, attempt: Attempt | None, message: str, *, for_s: float = 0.0) -> Waiting:
        life.waiting = True
        if attempt is not None:
            log.warning("outcome unknown", attempt=attempt.number, error=message)
        return Waiting(why=Why.UNKNOWN, message=message, after_s=self._core.backoff(life), for_s=for_s)

    def _refused(self, life: Life, kind: RejectionKind, message: str) -> Refused:
        refusal = Refused(kind=kind, message=message)
        if life.refusal != refusal:
            life.refusal = refusal
            self._core.notify(life.claim.uid)
        return refusal

    def _wait(self, life: Life, why: Why, message: str) -> Waiting:
        return Waiting(why=why, message=message, after_s=self._core.backoff(life))


def _attempt_of(
    claim: ClaimSpec,
    *,
    number: int,
    sequence: int,
    identity: str,
    ceiling: Decimal | None,
    pins: Mapping[str, str] | None = None,
) -> Attempt:
    return Attempt(
        claim_uid=claim.uid,
        number=number,
        sequence=sequence,
        identity=identity,
        token=identity,
        account=claim.account,
        region=claim.region,
        tier=claim.tier,
        ceiling_usd_per_hour=ceiling,
        options=claim.options,
        pins=pins or {},
    )


def _unrecorded(attempt: Attempt, answer: Accepted, facts: RunFacts) -> Unrecorded:
    """A machine whose order was answered, for the claim to remember."""
    return Unrecorded(
        ref=answer.ref,
        identity=attempt.identity,
        meters=answer.meters,
        created_at=answer.created_at,
        account_id=facts.account_id,
        shown=False,
    )


def _dear(claim: ClaimSpec, price: Decimal | None) -> Rejection | None:
    """Why a machine at ``price`` dollars an hour must go back; an unknown one was judged before the order."""
    if claim.max_price is None or price is None or price <= claim.max_price:
        return None
    message = f"rented for {usd(price)} an hour, at most {usd(claim.max_price)}"
    # The price that we were told is not true: tried again at once, we would buy and return for ever.
    scope = BlockScope(
        accelerator=claim.accelerator.key if claim.accelerator else "", tier=claim.tier, region=claim.region
    )
    return Rejection(kind=RejectionKind.PRICE, message=message, scope=scope)


def _hidden(answer: Accepted | Rejection, hide: Callable[[str], str]) -> Accepted | Rejection:
    """The answer with its words fit for rows, logs and a Pod's status."""
    if isinstance(answer, Rejection):
        return replace(answer, message=hide(answer.message))
    if answer.unfit is None:
        return answer
    return replace(answer, unfit=replace(answer.unfit, message=hide(answer.unfit.message)))


def _names_only_a_host(scope: BlockScope | None) -> bool:
    if scope is None or scope.host is None:
        return False
    return scope.accelerator is None and scope.tier is None and scope.region is None


def _decided(life: Life) -> Outcome | None:
    """What memory alone can answer: the states that never go back."""
    if life.state in ("ending", "ended"):
        return Over()
    if life.state == "live" and life.ref is not None and life.judged:
        return Rented(ref=life.ref)
    return None


def _lasts_s(attempt: AttemptRow, account: Account) -> float:
    """Seconds from now until a complete list must show what this attempt made, if it made anything."""
    return attempt.send_by_in_s + account.provision_timeout_s + account.settle_after_s
