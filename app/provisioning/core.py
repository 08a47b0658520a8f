"""What renting and releasing share: the rooms they stand on, the lives, and the two ways to a cloud.

One `Core` a replica. Nothing in it outlives the process but what the rows say.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import orjson
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.inventory.identity import parse
from app.inventory.rounds import AccountKey, Inventory, Known, Place
from app.provisioning.lives import Life
from app.provisioning.memory import decoded, encoded, merged, meters_json
from app.provisioning.metrics import TERMINATE_FAILURES
from app.provisioning.model import (
    ClaimPort,
    ClaimSpec,
    ClaimUnreadable,
    Leadership,
    LiveClaim,
    MarkRefused,
    Unrecorded,
)
from app.settings import Settings
from app.store import rentals, seen
from app.store.engine import StoreUnavailable, begin, single
from app.store.installation import hold
from app.store.rentals import Rows, RunFacts
from app.store.together import Together
from catalog.offerings import Offerings
from providers.base import (
    ClaimUid,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    Offering,
    ProviderError,
    Ref,
    ResourceId,
    Terminated,
    Throttled,
    Workload,
    usd_per_hour,
)

log = structlog.get_logger()
SEQUENCES = 32
_DATA, _CHECK = "22", "23514"  # SQLSTATE: a value that its column cannot hold, or must not


@dataclass(slots=True)
class Core:
    """The parts, and what this process knows of each claim."""

    accounts: Accounts
    inventory: Inventory
    offerings: Offerings
    engine: AsyncEngine
    settings: Settings
    installation: str
    leadership: Leadership
    clock: Callable[[], float] = time.monotonic
    # Whether a watch shows the claim: then it need not be asked for again and again.
    shown: Callable[[ClaimUid], bool] = lambda _uid: False
    highest_mark: int = 0
    lives: dict[ClaimUid, Life] = field(default_factory=dict)
    listeners: list[Callable[[ClaimUid], None]] = field(default_factory=list)
    facts: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    written: dict[ClaimUid, set[int]] = field(default_factory=dict)  # sequences whose rows were looked for
    sequences: list[int] = field(default_factory=list)  # drawn and not given out yet, rising
    # Every region that a machine of ours was ever in: one that no pool names any more may hold a late one.
    past_regions: dict[AccountKey, set[str]] = field(default_factory=dict)
    # The cloud's own ids of the accounts that open runs are in; None until the store has told.
    recorded_accounts: dict[AccountKey, frozenset[str]] | None = None
    _loads: Together[tuple[ClaimUid, str, str], Rows] = field(init=False)
    _fences: Together[rentals.Sending, bool] = field(init=False)

    def __post_init__(self) -> None:
        self._loads, self._fences = Together(self._load_all), Together(self._fence_all)

    def life(self, claim: ClaimSpec) -> Life:
        """What is known of the claim; the newest spec wins, since only its status part can differ."""
        life = self.lives.get(claim.uid)
        if life is None:
            life = self.lives[claim.uid] = Life(claim=claim)
        life.claim = claim
        return life

    def notify(self, uid: ClaimUid) -> None:
        for listener in self.listeners:
            listener(uid)

    def epoch(self) -> int | None:
        """Our epoch, if we may write with it at this moment."""
        return self.leadership.epoch if self.leadership.valid() else None

    def backoff(self, life: Life) -> float:
        """The next wait for this claim: doubling from the base to the most."""
        wait_s = min(self.settings.backoff_max_s, self.settings.backoff_base_s * 2.0 ** min(life.tries, 16))
        life.tries += 1
        return wait_s

    def places(self, claim: ClaimSpec, regions: set[str]) -> list[Place] | None:
        """Where machines of these regions would be listed; None while the account is not open."""
        places = {self.inventory.place(claim.key, region) for region in regions}
        return None if None in places else sorted((place for place in places if place), key=str)

    def doubt(self, claim: ClaimSpec, places: Iterable[Place], rows: Rows) -> str | None:
        """Why an unanswered attempt is not settled though no list shows its machine; None: it is.

        A pod that a person has renamed, and a person's copy of a pod, look alike. So neither is ended, and
        nothing else is rented for the claim, until a person has said which it is.
        """
        # Not by their numbers: an attempt whose row was lost is written down again with another one.
        sequences = [attempt.sequence for attempt in rows.unsettled()]
        recorded = {run.resource_id for run in rows.runs}
        for place in places:
            for found in self.inventory.doubts(claim.uid, place, sequences=sequences):
                if found in recorded:
                    continue
                doubt = (
                    f"machine {found} may be the one that an unanswered request made, under another name:"
                    " give it its name back if it is, or delete it"
                )
                life = self.life(claim)
                if life.doubt != doubt:  # said once
                    life.doubt = doubt
                    log.warning("not settled", claim=claim.name, why=doubt)
                return doubt
        return None

    async def load(self, claim: ClaimSpec) -> Rows:
        """All rows of the claim.

        Raises:
            StoreUnavailable: also where the store has become another installation's.
        """
        rows = await self._loads.answer((claim.uid, claim.provider, claim.account))
        if rows.installation != self.installation:
            raise StoreUnavailable(
                f"the database is of installation {rows.installation}, we are {self.installation}"
            )
        return rows

    async def _load_all(
        self, asked: Collection[tuple[ClaimUid, str, str]]
    ) -> Mapping[tuple[ClaimUid, str, str], Rows]:
        async with single(self.engine) as conn:
            found = await rentals.load_many(conn, asked)
        return {key: found[key[0]] for key in asked}

    async def fence(self, uid: ClaimUid, *, number: int, epoch: int) -> bool:
        """May this attempt be sent now, as far as rows tell; read after this call began.

        Raises:
            StoreUnavailable: see there.
        """
        return await self._fences.answer((uid, number, epoch))

    async def _fence_all(self, asked: Collection[rentals.Sending]) -> Mapping[rentals.Sending, bool]:
        async with single(self.engine) as conn:
            allowed = await rentals.fence(conn, asked)
        return {each: each in allowed for each in asked}

    async def believe(self, claim: ClaimSpec, rows: Rows, live: LiveClaim, *, epoch: int) -> Rows:
        """Bring rows and mark together (design section 5, rule 8).

        An unsettled attempt above the mark was never sent; a marked attempt that the rows have lost is
        written down again, unsettled, and looked for like any other; sweeps are held from then on.
        One of the marked number with an older ``send_by`` is another: numbers are given out again after a
        restore, and a further restore may bring the first of that number back.
        """
        marked = live.mark.sequence if live.mark else 0
        unsent = [attempt for attempt in rows.unsettled() if attempt.sequence > marked]
        lost = live.mark is not None and not any(
            attempt.sequence == marked and attempt.send_by >= live.mark.send_by for attempt in rows.attempts
        )
        if not unsent and not lost:
            return rows
        async with begin(self.engine) as conn:
            for attempt in unsent:
                await rentals.settle(conn, claim.uid, number=attempt.number, outcome="unsent", epoch=epoch)
            if lost and live.mark is not None:
                await self._hold(conn, marked, f"claim {claim.name}")
                await rentals.open_rental(conn, claim.columns(), epoch=epoch)
                await rentals.rebuild_attempt(
                    conn, claim.uid, sequence=marked, send_by=live.mark.send_by, epoch=epoch
                )
        return await self.load(claim)

    async def adopt(self, life: Life, known: Known, *, epoch: int) -> bool:
        """Record a machine that a round or a get has shown. True: it is the rental's own one."""
        claim, machine = life.claim, known.machine
        meters = await self._ran_on(claim, known)
        facts = RunFacts(
            attempt=known.identity.attempt,
            resource_id=machine.ref.resource_id,
            region=machine.ref.region,
            account_id=self.account_id(claim),
            meters=meters_json(meters),
            usd_per_hour=usd_per_hour(meters),
            accepted=False,
            seen=True,
            provider_created_at=machine.created_at,
        )
        async with single(self.engine) as conn:
            state, main = await rentals.record(conn, claim.columns(), facts, outcome="found", epoch=epoch)
        if main == machine.ref.resource_id:
            life.ref, life.machine, life.identity = machine.ref, machine, machine.identity
        life.state = state
        self.note_account(claim.key, facts.account_id)
        log.info(
            "machine found",
            resource=machine.ref.resource_id,
            state=state,
            extra=main != machine.ref.resource_id,
        )
        self.notify(claim.uid)
        return main == machine.ref.resource_id

    async def remember(self, claim: ClaimSpec, machines: Sequence[Unrecorded], *, port: ClaimPort) -> bool:
        """Have the claim remember what no row can take down now. False: it is not known to do so.

        True as well where a live GET says that the claim is gone: then nobody is left who could remember.
        """
        try:
            live = await port.look(claim)
            if live is None:
                return True
            held = self.remembered(claim, live)
            told = merged(held, machines)
            if told != list(held):
                if (life := self.lives.get(claim.uid)) is not None:
                    life.looked = None  # also where the answer is lost
                memory = encoded(told, claim, secret=self.accounts.machine_secret)
                await port.remember(claim, memory, live=live)
        except (ClaimUnreadable, MarkRefused) as error:
            log.info("what has no row is not remembered yet", claim=claim.name, error=str(error))
            return False
        return True

    def remembered(self, claim: ClaimSpec, live: LiveClaim | None) -> tuple[Unrecorded, ...]:
        """The machines that the claim remembers for the store."""
        secret = self.accounts.machine_secret
        return decoded(live.memory, claim, secret=secret) if live is not None else ()

    async def record_remembered(
        self, claim: ClaimSpec, machine: Unrecorded, rows: Rows, *, epoch: int
    ) -> None:
        """Write down what the claim remembers of a machine that is proven gone.

        Raises:
            DBAPIError: the rows stood in the way now; again, later.
        """
        identity = parse(machine.identity)
        sequence = identity.sequence if identity is not None else None
        facts = RunFacts(
            # by the sequence: an attempt whose row was lost is written down again with another number
            attempt=next((row.number for row in rows.attempts if row.sequence == sequence), None),
            resource_id=machine.ref.resource_id,
            region=machine.ref.region,
            account_id=machine.account_id,
            meters=meters_json(machine.meters),
            usd_per_hour=usd_per_hour(machine.meters),
            accepted=not machine.shown,
            seen=machine.shown,
            provider_created_at=machine.created_at,
            terminate_asked_at=machine.asked_at,
            gone=True,
        )
        try:
            async with single(self.engine) as conn:
                await rentals.record(conn, claim.columns(), facts, outcome="found", epoch=epoch)
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None) or _DATA
            if not state.startswith(_DATA) and state != _CHECK:
                raise
            # What a cloud said is none that a row takes: that must not keep the claim for ever.
            log.error("what a claim remembers was refused", resource=facts.resource_id, error=str(error.orig))
        else:
            log.info("a machine of a time without a database has its run", resource=facts.resource_id)

    async def _ran_on(self, claim: ClaimSpec, known: Known) -> tuple[Meter, ...]:
        """The meters of a machine that is recorded now.

        One that is over when it is first seen shows what it still costs, such as its disk, and not what it
        ran on: that is what was ordered. Where nobody knows it there are none, and its seconds are unpriced.
        """
        machine = known.machine
        kinds = {meter.kind for meter in machine.meters}
        up = machine.state not in (MachineState.EXITED, MachineState.GONE)
        if up or claim.accelerator is None or kinds & {MeterKind.GPU, MeterKind.MACHINE}:
            return machine.meters
        async with single(self.engine) as conn:
            shape = await rentals.shape_of(conn, claim.uid, number=known.identity.attempt)
        regions = (claim.region, machine.ref.region, "")
        offers = self.offerings.get(*claim.key)
        ordered = [
            offer
            for offer in (offers.offerings if offers is not None else ())
            if offer.accelerator is not None
            and offer.accelerator.key == claim.accelerator.key
            and offer.tier is claim.tier
            and offer.region in regions
            and shape in (None, offer.shape)
        ]
        if len(ordered) == 1:
            return (*(meter for meter in ordered[0].meters if meter.kind not in kinds), *machine.meters)
        return ()

    async def next_sequence(self, *, above: int) -> int:
        """A sequence number above ``above`` that nobody else gets. Drawn by the dozen: gaps do no harm."""
        usable = [number for number in self.sequences if number > above]
        if not usable:
            async with single(self.engine) as conn:
                usable = await rentals.next_sequences(conn, above=above, count=SEQUENCES)
            self.sequences = sorted({*self.sequences, *usable})  # another caller may have drawn meanwhile
        self.sequences = [number for number in self.sequences if number > usable[0]]
        return usable[0]

    def recorded_account(self, key: AccountKey) -> str | None:
        """For the inventory: the account that an answer must come from; "" when nothing is recorded.

        Machines in two accounts under one name are an error of configuration: no answer is right then.
        """
        if self.recorded_accounts is None:
            return None
        ids = self.recorded_accounts.get(key, frozenset())
        return next(iter(ids), "") if len(ids) < 2 else f"one of {', '.join(sorted(ids))}"

    def wrong_account(self, account: Account) -> str | None:
        """Why nothing may be rented or concluded with this credential; None if our machines are there."""
        recorded = self.recorded_account(account.key)
        if not recorded or recorded == account.account_id:
            return None
        return (
            f"{account.name}'s credential is for account {account.account_id}, our machines are in {recorded}"
        )

    def marked_elsewhere(self, account: Account, rows: Rows, live: LiveClaim | None) -> str | None:
        """Why this credential cannot tell what came of the marked attempt; None if it can, or all is settled.

        Of an attempt without an answer, and of one whose rows are lost, no run tells the account.
        """
        mark = live.mark if live is not None else None
        if mark is None or mark.account_id in (None, account.account_id):
            return None
        if not any(attempt.sequence == mark.sequence for attempt in rows.unsettled()):
            return None
        return (
            f"{account.name}'s credential is for account {account.account_id}, the machine was asked for in"
            f" {mark.account_id}"
        )

    def note_account(self, key: AccountKey, account_id: str | None) -> None:
        """A machine was recorded in this account of the cloud."""
        if self.recorded_accounts is not None and account_id:
            self.recorded_accounts[key] = self.recorded_accounts.get(key, frozenset()) | {account_id}

    def machines(self, life: Life) -> list[Known]:
        """What rounds have shown for the claim under its own provider and account, oldest first."""
        return [known for known in self.inventory.of_claim(life.claim.uid) if life.is_own(known.ref)]

    async def recall(self, life: Life, account: Account) -> bool:
        """Get, by id, what rounds of earlier processes have shown for the claim. False: not all was answered.

        A machine that any round has shown is found, and only a get says that it is gone (rule 7).
        """
        if life.recalled:
            return True
        async with single(self.engine) as conn:
            rows = await seen.of_claim(conn, life.claim.uid)
        for row in rows:
            ref = Ref(
                provider=row.provider,
                account=row.account,
                region=row.region,
                resource_id=ResourceId(row.resource_id),
            )
            if not life.is_own(ref) or self.inventory.known(ref) is not None:
                continue
            try:
                await self.get(account, ref)
            except ProviderError as error:
                log.info("get failed", resource=ref.resource_id, error=str(error))
                return False
        life.recalled = True
        return True

    def account_id(self, claim: ClaimSpec) -> str | None:
        account = self.accounts.get(claim.key)
        return account.account_id if account else None

    async def terminate(self, life: Life, account: Account, ref: Ref) -> Terminated | None:
        """Ask once more for the machine's end; None when the cloud did not take the request."""
        await account.budget.take(Urgency.TERMINATE)
        began = self.clock()
        try:
            async with asyncio.timeout(account.call_timeout_s):
                answer = await account.provider.terminate(ref)
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            TERMINATE_FAILURES.labels(provider=ref.provider, reason="throttled").inc()
            return None
        except (ProviderError, TimeoutError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "refused"
            TERMINATE_FAILURES.labels(provider=ref.provider, reason=reason).inc()
            log.warning(
                "terminate failed", resource=ref.resource_id, error=str(error) or type(error).__name__
            )
            return None
        self.inventory.expect_end(ref)
        log.info(
            "terminate", resource=ref.resource_id, answer=answer.value, took_s=round(self.clock() - began, 3)
        )
        return answer

    async def get(self, account: Account, ref: Ref) -> Machine | None:
        """The machine by id, None when the cloud says there is none (history included).

        Raises:
            ProviderError: nothing is known.
        """
        await account.budget.take(Urgency.TERMINATE)
        try:
            async with asyncio.timeout(account.call_timeout_s):
                machine = await account.provider.get(ref)
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            raise
        except TimeoutError as error:
            raise ProviderError(f"get {ref.resource_id}: no answer") from error
        if machine is not None:
            self.inventory.learn(machine)
        return machine if machine is not None and machine.exists else None

    async def verify(self, uid: ClaimUid, sequence: int, *, shown_by: str, epoch: int) -> None:
        """Hold every sweep if a machine carries an attempt above all that had been written down when this
        term began: the store is older than the world (design section 5, rule 8).

        One below them that has no row is an orphan and no more: its row was there, and somebody took it away.
        """
        if sequence in self.written.get(uid, ()):
            return
        async with begin(self.engine) as conn:
            if not await rentals.has_attempt(conn, uid, sequence=sequence):
                highest = await rentals.highest_attempt(conn, before_epoch=epoch)
                if sequence > highest:
                    await self._hold(conn, sequence, shown_by)
        self.written.setdefault(uid, set()).add(sequence)  # said once

    async def _hold(self, conn: AsyncConnection, sequence: int, shown_by: str) -> None:
        if await hold(conn, f"{shown_by} carries attempt {sequence}, which has no row", sequence=sequence):
            log.error("the store has lost rows: sweeps are held", sequence=sequence, shown_by=shown_by)


def run_facts(ref: Ref, machine: Machine | None, *, gone: bool) -> dict[str, object]:
    """What a list or a get shows of a recorded machine, as `app.store.rentals.observe` takes it."""
    end = machine.end if machine else None
    state = machine.state if machine else None
    return _NOTHING | {
        **_key(ref),
        "seen": True,
        "running": state is MachineState.RUNNING,
        "again": state is MachineState.RUNNING and end is None and not gone,
        "exited": end is not None or state in (MachineState.EXITED, MachineState.GONE),
        "gone": gone,
        "provider_created_at": machine.created_at if machine else None,
        "provider_started_at": machine.started_at if machine else None,
        "provider_ended_at": end.at if end else None,
        "end_reason": end.reason.value if end else None,
        "exit_code": end.exit_code if end else None,
        "meters": meters_json(machine.meters) if machine else [],
    }


def terminate_fact(ref: Ref, *, at: float) -> dict[str, object]:
    """The cloud has taken a terminate at that moment of `Core.clock`; the first one counts.

    It may have to wait for the store: then how long ago it was is told beside it, and no clock is compared.
    """
    return _NOTHING | {**_key(ref), "asked_at": at}


_NOTHING: dict[str, object] = dict.fromkeys(("seen", "running", "again", "exited", "gone"), False)
_NOTHING["asked_at"] = None
_NOTHING |= dict.fromkeys(
    ("provider_created_at", "provider_started_at", "provider_ended_at", "end_reason", "exit_code")
)
_NOTHING["meters"] = []


def _key(ref: Ref) -> dict[str, object]:
    return {"provider": ref.provider, "account": ref.account, "resource_id": ref.resource_id}


def request_hash(
    claim: ClaimSpec,
    workload: Workload,
    offering: Offering,
    *,
    avoid: frozenset[str],
    ceiling: Decimal | None,
) -> str:
    """A digest of the exact request: a replay must be byte-identical, secrets included."""
    body = orjson.dumps(
        {
            "workload": asdict(workload),
            "shape": offering.shape,
            "region": claim.region,
            "tier": claim.tier.value,
            "options": dict(claim.options),
            "avoid": sorted(avoid),
            "ceiling": None if ceiling is None else str(ceiling.normalize()),
        },
        option=orjson.OPT_SORT_KEYS,
        default=_plain,
    )
    return hashlib.sha256(body).hexdigest()


def _plain(value: object) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(type(value).__name__)
