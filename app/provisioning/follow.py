"""What rounds mean for rentals: facts of runs, adoption, extras, machines gone, claims gone. Design rule 9.

Rounds call in synchronously and only queue claims; the work is done claim by claim. Whatever fails is looked
at again at the next round, so nothing here retries by itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.inventory.accounts import Account
from app.inventory.identity import Identity, parse
from app.inventory.rounds import Judged, Known, Place
from app.provisioning.core import Core, run_facts, terminate_fact
from app.provisioning.lives import Life, claim_from_columns
from app.provisioning.model import ClaimPort, ClaimSpec, ClaimUnreadable, Release, Released
from app.store import rentals, seen
from app.store.engine import StoreUnavailable, begin, single
from app.store.installation import held, hold
from app.store.rentals import Recorded
from app.store.sweep_facts import mirrored_claim, regions
from providers.base import ClaimUid, Machine, MachineState, ProviderError, Ref, ResourceId, Tier

log = structlog.get_logger()
FACTS_EVERY_S = 0.05
KEEPERS = 16
PREPARE_S = 3.0


class Follower:
    """Turns judged rounds into rows and work. ``release`` is `Releaser.release`; ``reread`` is told when all
    rows are read anew, as they are in a store that was put back."""

    def __init__(
        self,
        core: Core,
        *,
        port: ClaimPort,
        release: Callable[..., Awaitable[Release]],
        reread: Callable[[], None],
    ) -> None:
        self._core, self._port, self._release, self._reread = core, port, release, reread
        self._due: asyncio.Queue[ClaimUid] = asyncio.Queue()
        self._queued: set[ClaimUid] = set()
        core.inventory.on_round(self.take)

    def take(self, judged: Judged) -> None:
        """A round was judged: note facts, wake callers, queue the claims that need work."""
        core = self._core
        key = (judged.place.provider, judged.place.account)
        for uid in judged.claims:
            life = core.lives.get(uid)
            known = core.inventory.of_claim(uid)
            for machine in known:
                self._note(machine.machine, life)
            if life is None or life.state != "live" or not all(life.is_main(each.ref) for each in known):
                self._queue(uid)
            if life is not None:
                self._project(life)
        if judged.unknown is None:
            for uid, life in core.lives.items():
                if life.key != key:
                    continue
                if life.waiting:
                    core.notify(uid)
                if life.state == "live" and not life.gone and uid not in judged.claims:
                    self._queue(uid)
            self._queue_vanished(judged)

    def _queue_vanished(self, judged: Judged) -> None:
        """Machines of ended or forgotten claims that a complete list no longer shows: their runs end now."""
        core = self._core
        for uid in core.inventory.claims() - judged.claims:
            life = core.lives.get(uid)
            if life is not None and life.state != "ended":
                continue
            if any(known.place == judged.place for known in core.inventory.of_claim(uid)):
                self._queue(uid)

    def _project(self, life: Life) -> None:
        """Show the newest sight of the recorded machine; tell only of differences."""
        ref = life.ref or life.hint
        known = self._core.inventory.known(ref) if ref is not None else None
        if known is None or known.machine == life.machine or known.identity.claim_uid != life.claim.uid:
            return
        life.machine = known.machine
        if known.machine.state is not MachineState.QUEUED:
            life.reserved = True
        settled = (MachineState.RUNNING, MachineState.EXITED, MachineState.GONE)
        if life.state != "ending" and known.machine.state in settled:  # a release needs two more lists
            self._core.inventory.settle(life.key, life.claim.uid)
        else:
            self._core.inventory.stir(life.key, life.claim.uid)
        self._core.notify(life.claim.uid)

    def _note(self, machine: Machine, life: Life | None) -> None:
        """Queue the run's new facts, once for each difference."""
        end = machine.end
        facts = (machine.state, machine.created_at, machine.started_at, end, machine.meters)
        if life is not None:
            if life.noted.get(machine.ref.resource_id) == facts:
                return
            life.noted[machine.ref.resource_id] = facts
        self._core.facts.put_nowait(run_facts(machine.ref, machine, gone=False))

    def _queue(self, uid: ClaimUid) -> None:
        if uid not in self._queued:
            self._queued.add(uid)
            self._due.put_nowait(uid)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_facts(), name="run-facts")
            tasks.create_task(self._keep(), name="rentals-without-claim")
            for n in range(4):
                tasks.create_task(self._work(), name=f"follow-{n}")

    async def _work(self) -> None:
        while True:
            uid = await self._due.get()
            self._queued.discard(uid)
            with structlog.contextvars.bound_contextvars(claim_uid=uid):
                try:
                    await self._tend(uid)
                except (StoreUnavailable, ClaimUnreadable, ProviderError) as error:
                    log.info("left for the next round", error=str(error))
                except Exception:
                    log.exception("tending a claim's machines failed")

    async def _tend(self, uid: ClaimUid) -> None:
        core = self._core
        epoch = core.epoch()
        if epoch is None:
            return
        known = core.inventory.of_claim(uid)
        for machine in known:
            shown_by = f"machine {machine.ref.resource_id}"
            await core.verify(uid, machine.identity.sequence, shown_by=shown_by, epoch=epoch)
        life = core.lives.get(uid)
        if life is None or life.state is None or (life.state == "live" and life.ref is None):
            life = await self._met(uid)
        if life is None:
            await self._stranger(uid, known)
            return
        known = self._own(life, known)
        if life.state == "open":
            if known and not life.renting.locked():
                async with life.renting:
                    if life.state == "open":
                        await core.adopt(life, known[0], epoch=epoch)
        elif life.state == "live":
            for machine in known:
                if not life.is_main(machine.ref):
                    await self._end_extra(life, machine, epoch)
            await self._check_gone(life)
        elif life.state == "ended":
            for machine in known:
                await self._end_extra(life, machine, epoch)

    def _own(self, life: Life, known: list[Known]) -> list[Known]:
        """Those under the claim's own provider and account.

        The same machine elsewhere is a finding, no extra: two names may be one account of a cloud.
        """
        for machine in known:
            if not life.is_own(machine.ref):
                log.error(
                    "a machine is shown under another account than its claim's",
                    resource=machine.ref.resource_id,
                    shown=f"{machine.ref.provider}/{machine.ref.account}",
                    claim=life.claim.name,
                )
        return [machine for machine in known if life.is_own(machine.ref)]

    async def _met(self, uid: ClaimUid) -> Life | None:
        """What the rows know of a claim that this process has not met; None if they do not know it."""
        async with single(self._core.engine) as conn:
            rows = await rentals.recorded(conn, uid=uid)
        return self._restore(rows[0]) if rows else None

    async def _stranger(self, uid: ClaimUid, known: list[Known]) -> None:
        """Machines of a claim that no row knows. If its claim is gone as well, the sweep judges them."""
        core = self._core
        known = [machine for machine in known if not await self._forgotten(machine)]
        if not known:
            return
        if await self._port.find(uid):
            core.notify(uid)  # its own room will come to it, by the claim's mark
            return
        log.debug("a machine whose claim is gone and forgotten", machine=known[0].ref.resource_id)

    async def _forgotten(self, machine: Known) -> bool:
        """Whether it is over; then nobody needs to remember it, since no run of ours is open for it."""
        core, ref = self._core, machine.ref
        account = core.accounts.get((ref.provider, ref.account))
        shown = machine.shown_at
        if account is None or not await self._proven_gone(account, ref, after=shown, later=shown):
            return False
        core.facts.put_nowait(run_facts(ref, machine.machine, gone=True))
        core.inventory.forget(ref)
        return True

    async def end_forgotten(self, ref: Ref, identity: Identity, *, reason: str) -> str:
        """Begin the end of a machine that no claim and no row knows: the sweep's one way to destroy.

        Everything is looked at once more, live: the hold, the claims, the rows, and the machine by its id.
        Then a rental is inserted as ``ending``, and from there on it is released like any other, whoever
        leads. Returns what came of it, for the trail; it begins with "begun" if the end has begun.

        Raises:
            StoreUnavailable, ClaimUnreadable, ProviderError: nothing was begun.
        """
        core, uid = self._core, identity.claim_uid
        account = core.accounts.get((ref.provider, ref.account))
        if (epoch := core.epoch()) is None:
            return "refused: we do not lead"
        if account is None or (wrong := core.wrong_account(account)) is not None:
            return f"refused: {'the account is not open' if account is None else wrong}"
        if identity.installation != core.installation:
            return "refused: it is another installation's"
        # The rounds do so, too, but maybe later: who works on them may have much to do.
        await core.verify(uid, identity.sequence, shown_by=f"machine {ref.resource_id}", epoch=epoch)
        async with begin(core.engine) as conn:
            if (why := await held(conn)) is not None:
                return f"refused: sweeps are held: {why.reason}"
            known = await rentals.recorded(conn, uid=uid)
            owner = await mirrored_claim(conn, uid)
        if known:
            return f"refused: its rental is {known[0].state}"
        if await self._port.find(uid):
            return "refused: its claim exists"
        machine = await core.get(account, ref)
        if machine is None:
            return "refused: a get by its id says that it is gone"
        if parse(machine.identity) != identity:
            return "refused: a get by its id shows another identity"
        log.warning(
            "a machine whose claim is gone and forgotten is ended", machine=ref.resource_id, why=reason
        )
        release = await self._release(_forgotten_claim(ref, uid, owner), port=self._port, reason=reason)
        return f"begun: {'gone' if isinstance(release, Released) else release.message}"

    async def _end_extra(self, life: Life, extra: Known, epoch: int) -> None:
        """End a machine beside the recorded one, or one that came after the end, until it is gone."""
        core = self._core
        account = core.accounts.get(life.key)
        if account is None:
            return
        resource_id = extra.ref.resource_id
        asked = life.terminated.get(resource_id)
        if asked is None:
            if await core.adopt(life, extra, epoch=epoch) and life.state == "live":
                return  # the rows know better than our memory: it is the recorded one
            log.warning("an extra machine is ended", resource=resource_id, state=life.state)
        if extra.machine.exists and (asked is None or core.clock() - asked > core.settings.backoff_max_s):
            if await core.terminate(life, account, extra.ref) is not None:
                life.terminated[resource_id] = core.clock()
                core.facts.put_nowait(terminate_fact(extra.ref, at=core.clock()))
            return
        if asked is not None and await self._proven_gone(account, extra.ref, after=asked, later=asked):
            self._gone(life, extra.ref)

    async def _check_gone(self, life: Life) -> None:
        """A recorded machine that two complete lists do not show, nor a get: it is over."""
        core = self._core
        account = core.accounts.get(life.key)
        if account is None or life.ref is None or life.gone:
            return
        known = core.inventory.known(life.ref)
        if known is not None and not known.machine.exists:
            if await core.get(account, life.ref) is None:
                self._gone(life, life.ref)
            return
        after = life.rented_at if known is None else known.shown_at
        if after is None:  # recorded by an earlier process and never shown to this one
            life.rented_at = after = core.clock()
        # What was never shown may still be on its way into the list.
        later = after if known is not None else after + account.settle_after_s
        if await self._proven_gone(account, life.ref, after=after, later=later):
            self._gone(life, life.ref)

    async def _proven_gone(self, account: Account, ref: Ref, *, after: float, later: float) -> bool:
        core = self._core
        place = core.inventory.place(account.key, ref.region)
        if place is None or core.wrong_account(account) is not None:
            return False  # another account's get would know nothing of it
        earlier = core.inventory.two_complete(place, first_after=after, later_after=later)
        known = core.inventory.known(ref)
        if earlier is None or (known is not None and known.machine.exists and known.shown_at >= earlier):
            return False
        return await core.get(account, ref) is None

    def _gone(self, life: Life, ref: Ref) -> None:
        core = self._core
        known = core.inventory.known(ref)
        core.facts.put_nowait(run_facts(ref, known.machine if known else None, gone=True))
        core.inventory.forget(ref)
        log.info("machine gone", resource=ref.resource_id, claim=life.claim.name)
        if ref == life.ref:
            life.gone = True
            core.inventory.settle(life.key, life.claim.uid)
            core.notify(life.claim.uid)

    # --- facts and leftovers ---

    async def _write_facts(self) -> None:
        core = self._core
        waiting: dict[tuple[str, str, str], dict[str, Any]] = {}
        while True:
            if not waiting:
                _merge(waiting, await core.facts.get())
            await asyncio.sleep(FACTS_EVERY_S)  # what arrives meanwhile goes in the same statement
            while not core.facts.empty():
                _merge(waiting, core.facts.get_nowait())
            try:
                await self._observe(list(waiting.values()))
            except StoreUnavailable:
                await asyncio.sleep(core.settings.backoff_base_s)
            else:
                waiting.clear()

    async def _observe(self, rows: list[dict[str, Any]]) -> None:
        """Write them together; one that Postgres refuses must not keep the others from being written."""
        try:
            async with single(self._core.engine) as conn:
                now = self._core.clock()  # after the wait for a connection
                await rentals.observe(conn, [_aged(row, now) for row in rows])
        except DBAPIError as error:
            if len(rows) == 1:
                log.error(
                    "a machine's facts were refused", error=str(error.orig), machine=rows[0]["resource_id"]
                )
                return
            for row in rows:
                await self._observe([row])

    async def _keep(self) -> None:
        """Load what earlier leaders left, then release every rental whose claim a live GET says is gone."""
        core, loaded = self._core, None
        while True:
            try:
                epoch = core.epoch()
                if epoch is not None:
                    if loaded != epoch:
                        await self._load()
                        self._reread()
                        await self._recall_regions()
                        loaded = epoch
                    await self._confirm_accounts()
                    await self._keep_all()
                    await self._close_strays()
            except StoreUnavailable as error:
                log.info("rentals not checked", error=str(error))
            except Exception:
                log.exception("checking rentals failed")
            await asyncio.sleep(core.settings.list_rest_s)

    async def prepare(self, account: Account) -> None:
        """What the rows know of an account, before its first list is judged by it.

        A store that is away is waited for, but not for long: lists of an account that is not confirmed are
        unknown, and do no harm.
        """
        core = self._core
        with suppress(TimeoutError):
            async with asyncio.timeout(PREPARE_S):
                while True:
                    try:
                        async with begin(core.engine) as conn:
                            if core.recorded_accounts is None:
                                core.recorded_accounts = await rentals.open_run_accounts(conn)
                            shown = await _present(conn, account)
                    except StoreUnavailable:
                        await asyncio.sleep(core.settings.backoff_base_s)
                        continue
                    for place, refs in _by_place(core, shown).items():
                        core.inventory.expect(place, refs)
                    return

    async def _load(self) -> None:
        """Take over what the rows say, also where it is less than before: a store may be restored."""
        core = self._core
        before = [uid for uid, life in core.lives.items() if life.has_row]
        async with begin(core.engine) as conn:
            rows = await rentals.recorded(conn)
            core.recorded_accounts = await rentals.open_run_accounts(conn)
            shown = [row for account in core.accounts for row in await _present(conn, account)]
            if before and (lost := await rentals.without_row(conn, before)):
                # They had rows: the store was put back, whatever the clouds will show of them.
                name = core.lives[lost[0]].claim.name
                await hold(conn, f"{len(lost)} rentals have lost their rows, that of {name} among them")
                log.error("the store has lost rows: sweeps are held", rentals=len(lost))
        core.written.clear()
        for known in core.lives.values():
            known.noted.clear()  # what was written of a machine may be lost: it is told again
        for place, refs in _by_place(core, shown).items():
            core.inventory.expect(place, refs)
        there = {row.claim_uid for row in rows}
        for uid in before:  # whatever was rented since then is no news of the rows
            life = core.lives.get(uid)
            if life is not None and uid not in there and life.has_row:
                life.state, life.ref, life.recalled, life.judged = None, None, False, False
                core.notify(uid)  # whoever asked for it asks again, and the rows are made anew
        for row in rows:
            life = self._restore(row)
            if row.state != "live" or not row.running:
                core.inventory.stir(life.key, row.claim_uid)

    async def _recall_regions(self) -> None:
        """Where machines of ours have ever been: also a region that no pool names any more is listed."""
        async with begin(self._core.engine) as conn:
            found = await regions(conn)
        for key, was_in in found.items():
            self._core.past_regions.setdefault(key, set()).update(was_in - {""})

    async def _confirm_accounts(self) -> None:
        """Ask the rows again where a credential is for another account than they told.

        Once the last machine there is gone, a credential of another account may be used like any other.
        """
        core, held = self._core, self._core.recorded_accounts
        wrong = [account.key for account in core.accounts if core.wrong_account(account) is not None]
        if held is None or not wrong:
            return
        before = {key: held.get(key) for key in wrong}
        async with begin(core.engine) as conn:
            found = await rentals.open_run_accounts(conn)
        for key in wrong:
            if held.get(key) is before[key]:  # nothing was recorded there meanwhile
                held[key] = found.get(key, frozenset())

    def _restore(self, row: Recorded) -> Life:
        core = self._core
        life = core.lives.get(row.claim_uid) or core.life(claim_from_columns(dict(row.values)))
        life.state, life.intending = row.state, False
        if row.resource_id is not None:
            life.ref = Ref(
                provider=row.values["provider"],
                account=row.values["account"],
                region=row.resource_region or "",
                resource_id=row.resource_id,
            )
            self._project(life)
        return life

    async def _close_strays(self) -> None:
        """Runs that no rental follows: a get says whether they are over.

        Else they would be billed for ever. One whose machine is there is left to the rounds, which end it.
        """
        core = self._core
        async with begin(core.engine) as conn:
            strays = await rentals.stray_runs(conn)
        for stray in strays:
            account = core.accounts.get((stray.provider, stray.account))
            if account is None or core.wrong_account(account) is not None:
                continue
            if not stray.seen and stray.age_s < account.settle_after_s:
                continue  # a fresh id may not be visible yet
            ref = Ref(
                provider=stray.provider,
                account=stray.account,
                region=stray.region,
                resource_id=stray.resource_id,
            )
            if (known := core.inventory.known(ref)) is not None and known.machine.exists:
                continue  # it is shown
            try:
                machine = await core.get(account, ref)
            except ProviderError as error:
                log.info("get failed", resource=ref.resource_id, error=str(error))
                continue
            if machine is None:
                core.facts.put_nowait(run_facts(ref, None, gone=True))
                log.info("a run without a rental is over", resource=ref.resource_id)

    async def _keep_all(self) -> None:
        """Side by side, so that a cloud that hangs delays only its own."""
        places = asyncio.Semaphore(KEEPERS)

        async def keep(life: Life) -> None:
            async with places:
                try:
                    await self._keep_one(life)
                except (StoreUnavailable, ClaimUnreadable) as error:
                    log.info("rental not checked", claim=life.claim.name, error=str(error))

        async with asyncio.TaskGroup() as tasks:
            for life in list(self._core.lives.values()):
                if life.state in ("open", "live", "ending") and not life.releasing.locked():
                    tasks.create_task(keep(life), name=f"keep {life.claim.name}")

    async def _keep_one(self, life: Life) -> None:
        if self._core.shown(life.claim.uid) or await self._port.look(life.claim) is not None:
            return
        with structlog.contextvars.bound_contextvars(claim=life.claim.name):
            log.info("releasing a rental whose claim is gone")
            release = await self._release(life.claim, port=self._port, reason="claim gone")
            if isinstance(release, Released):
                self._core.lives.pop(life.claim.uid, None)


async def _present(conn: AsyncConnection, account: Account) -> list[seen.Seen]:
    """This installation's machines that were in the account's last complete lists."""
    rows = await seen.present(conn, provider=account.name, account=account.account)
    return [row for row in rows if row.claim_uid is not None]


def _by_place(core: Core, rows: list[seen.Seen]) -> dict[Place, list[Ref]]:
    places: dict[Place, list[Ref]] = {}
    for row in rows:
        ref = Ref(
            provider=row.provider,
            account=row.account,
            region=row.region,
            resource_id=ResourceId(row.resource_id),
        )
        place = core.inventory.place((row.provider, row.account), row.region)
        if place is not None:
            places.setdefault(place, []).append(ref)
    return places


def _merge(waiting: dict[tuple[str, str, str], dict[str, Any]], row: dict[str, Any]) -> None:
    """One row a machine in a batch: a later fact joins an earlier one, and takes nothing but an end."""
    key = (str(row["provider"]), str(row["account"]), str(row["resource_id"]))
    old = waiting.get(key)
    if old is not None:
        asked_at = min((at for at in (old["asked_at"], row["asked_at"]) if at is not None), default=None)
        if not row["seen"]:
            row = old
        elif not old["seen"]:
            pass
        elif row["again"]:
            row = row | {name: row[name] or old[name] for name in ("provider_created_at", "gone", "meters")}
        else:
            row = {
                name: row[name] or old[name] if name != "exit_code" else _first(row[name], old[name])
                for name in row
            } | {"again": False}
        row = row | {"asked_at": asked_at}
    waiting[key] = row


def _aged(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The row as it is told to the store at ``now`` of the clock that the moment in it is of."""
    asked_at = row["asked_at"]
    return {**row, "asked_ago_s": None if asked_at is None else max(0.0, now - asked_at)}


def _first(new: object, old: object) -> object:
    return old if new is None else new


def _forgotten_claim(ref: Ref, uid: ClaimUid, owner: Mapping[str, Any] | None) -> ClaimSpec:
    """A claim that is gone, as its machine tells of it, and as the watch once showed it, if it did."""
    if owner is not None:
        values = {("claim_" if name in ("uid", "name") else "") + name: owner[name] for name in owner}
        claim = claim_from_columns(values)
        return replace(claim, provider=ref.provider, account=ref.account, region=claim.region or ref.region)
    return ClaimSpec(
        uid=uid,
        name="",
        pod_namespace="",
        pod_name="",
        pod_uid="",
        pool="",
        provider=ref.provider,
        account=ref.account,
        region=ref.region,
        tier=Tier.ON_DEMAND,
        accelerator=None,
    )
