"""What is asked of a cloud while a machine runs: a graceful stop, a restart in place, a longer life.

None of it rents or ends a machine, so none of it needs an intent: a call that was lost is made again. Nothing
is asked once the rental is in release.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import structlog
from sqlalchemy.exc import DBAPIError

from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.inventory.rounds import AccountKey
from app.provisioning.core import Core
from app.provisioning.lives import Life
from app.provisioning.model import ClaimSpec
from app.store import backoffs, blocks
from app.store.backoffs import Failure, Pace
from app.store.engine import StoreUnavailable, begin
from providers.base import MachineState, OutcomeUnknown, ProviderError, Ref, Throttled, Unavailable
from providers.capabilities import Executes, Extends, Restarts

log = structlog.get_logger()
FAILED_START = "start"  # why a place is passed over whose machine came to nothing
EXTENDS = 4  # times within one limit, so that three may fail
_UP = (MachineState.QUEUED, MachineState.BOOTING, MachineState.RUNNING)


class Kept(StrEnum):
    """What became of a call."""

    ASKED = "asked"  # the cloud took it; the next rounds show what came of it
    UNABLE = "unable"  # this cloud cannot, or there is no such machine any more
    AGAIN = "again"  # no answer: ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseStart:
    """A machine that was rented and whose workload never came to run, or broke soon after.

    ``late``: it is still there, booting. ``blocks``: its place is to be passed over for ``block_ttl_s``, or
    its ``host`` alone where the cloud names one. ``failure`` makes the Pod's owner wait as well.
    """

    claim: ClaimSpec
    host: str | None
    message: str
    late: bool
    blocks: bool
    block_ttl_s: float
    failure: Failure | None


@dataclass(slots=True)
class Keeper:
    """One a replica. Failures that the store did not take wait in memory, and go with the next."""

    core: Core
    _pending: list[Failure] = field(default_factory=list)

    def restarts(self, key: AccountKey) -> bool | None:
        """Whether the cloud can start a workload again on its machine; None while the account is not open."""
        account = self.core.accounts.get(key)
        return None if account is None else isinstance(account.provider, Restarts)

    def boot_deadline_s(self, key: AccountKey) -> float | None:
        """How long a machine may boot before it is given up; None while the account is not open."""
        account = self.core.accounts.get(key)
        return None if account is None else account.boot_deadline_s

    def stops(self, key: AccountKey) -> bool:
        """Whether a workload hears of its end before it comes, so that a grace is worth waiting for."""
        account = self.core.accounts.get(key)
        return account is not None and account.traits.graceful_stop

    async def stop(self, claim: ClaimSpec, *, grace_s: int) -> Kept:
        """Ask the workload to end within ``grace_s``."""
        found = self._machine(claim)
        if found is None or not found[1].traits.graceful_stop:
            return Kept.UNABLE
        life, account, ref = found
        self.core.inventory.stir(life.key, claim.uid)
        await account.budget.take(Urgency.TERMINATE)
        try:
            async with asyncio.timeout(account.call_timeout_s):
                await account.provider.stop(ref, grace_s=grace_s)
        except (ProviderError, TimeoutError) as error:
            self._failed(account, error, what="stop", ref=ref)
            return Kept.AGAIN
        log.info("stop", resource=ref.resource_id, grace_s=grace_s)
        return Kept.ASKED

    async def restart(self, claim: ClaimSpec, *, running: bool) -> Kept:
        """Start the workload again. ``running``: also if it runs, or else only if it has ended.

        A get comes first: a list may lag behind a restart that was already made.
        """
        found = self._machine(claim)
        if found is None:
            return Kept.AGAIN if self.restarts(claim.key) is None else Kept.UNABLE
        life, account, ref = found
        provider = account.provider
        if not isinstance(provider, Restarts):
            return Kept.UNABLE
        self.core.inventory.stir(life.key, claim.uid)
        try:
            machine = await self.core.get(account, ref)
            if machine is None:
                return Kept.UNABLE
            if machine.state in _UP and not running:
                return Kept.ASKED
            await account.budget.take(Urgency.RENT)
            if life.state != "live":
                return Kept.UNABLE
            async with asyncio.timeout(account.call_timeout_s):
                if not await provider.restart(ref):
                    return Kept.UNABLE
        except (ProviderError, TimeoutError) as error:
            self._failed(account, error, what="restart", ref=ref)
            return Kept.AGAIN
        log.info("restart", resource=ref.resource_id)
        return Kept.ASKED

    async def command(self, key: AccountKey, ref: Ref, command: Sequence[str], *, within_s: float) -> int:
        """Run a command beside the workload, and its exit code; what it says is read and forgotten.

        Cancelled, it is ended as far as the cloud can. ``within_s`` is how long it may take, and how long it
        may wait before that for a call that is free.

        Raises:
            ProviderError: it was not run, or nobody knows how it ended.
            TimeoutError: it took longer.
        """
        account = self.core.accounts.get(key)
        if account is None or not isinstance(account.provider, Executes):
            raise Unavailable("no commands can be run there now")
        try:
            async with asyncio.timeout(within_s):
                await account.budget.take(Urgency.RENT)
        except TimeoutError as error:  # that we had too many calls says nothing about the workload
            raise Unavailable("no call to the cloud was free in time") from error
        async with asyncio.timeout(within_s):
            return await self._run(account.provider, ref, command)

    async def _run(self, provider: Executes, ref: Ref, command: Sequence[str]) -> int:
        session = await provider.exec(ref, command, stdin=False, terminal=False)
        if session is None:
            raise Unavailable("the machine is gone")
        reading = [
            asyncio.ensure_future(_forget(session.stdout)),
            asyncio.ensure_future(_forget(session.stderr)),
        ]
        try:
            return await session.wait()
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await session.aclose()

    async def hook(self, claim: ClaimSpec, command: Sequence[str], *, within_s: float) -> str | None:
        """Run what is to be run before the workload's end; what went wrong, None if nothing."""
        found = self._machine(claim)
        if found is None:
            return "the machine is gone"
        try:
            async with asyncio.timeout(within_s):
                code = await self.command(claim.key, found[2], command, within_s=within_s)
        except TimeoutError:
            return "it was still running when the grace was over"
        except ProviderError as error:
            return str(error)
        return None if code == 0 else f"it exited with {code}"

    async def note(self, failure: Failure) -> None:
        """Count an end that the Pod's policy would answer with a restart which the cloud cannot make.

        Returns when it is on record, or waits for the store: nothing is placed before that is back.
        """
        self._pending.append(failure)
        await self._flush()

    async def note_start(self, start: FalseStart) -> None:
        """Have the place of a machine that came to nothing passed over, and its Pod's owner wait.

        A store that is away, or refuses it, loses the block, which costs one more try at worst: nothing is
        placed without a store.
        """
        claim = start.claim
        if start.failure is not None:
            await self.note(start.failure)
        if not start.blocks or not self.core.leadership.valid():
            return
        own = start.host is None
        scope = blocks.Scope(
            provider=claim.provider,
            account=claim.account,
            accelerator=(claim.accelerator.key if claim.accelerator else "") if own else None,
            tier=claim.tier.value if own else None,
            region=claim.region if own else None,
            host=start.host,
        )
        cause = blocks.Cause(
            kind=FAILED_START,
            message=start.message,
            pool=claim.pool,
            pod_namespace=claim.pod_namespace,
            pod_name=claim.pod_name,
            claim_uid=claim.uid,
        )
        try:
            async with begin(self.core.engine) as conn:
                await blocks.record(conn, scope, cause, ttl_s=start.block_ttl_s)
        except (StoreUnavailable, DBAPIError) as error:
            log.info("a false start is not on record", error=str(error)[:256])
        else:
            log.info("passed over after a false start", host=start.host, place=claim.place, why=start.message)

    async def run(self) -> None:
        """Write what the store did not take, and put off the limits of machines, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flush_again(), name="owners' waits")
            tasks.create_task(self._extend_all(), name="dead-man limits")

    async def _flush_again(self) -> None:
        while True:
            await asyncio.sleep(self.core.settings.backoff_max_s)
            await self._flush()

    async def _extend_all(self) -> None:
        """Each machine that has a limit, once in a quarter of it, for as long as its rental lives.

        The limit bounds what is lost when cluster, store and controller are all away: then nobody extends.
        """
        core = self.core
        limit_s = core.settings.dead_man_s
        while limit_s:
            for life in list(core.lives.values()):
                machine, due = life.machine, core.clock() - life.extended_at >= limit_s / EXTENDS
                if machine is None or machine.expires_at is None or not due or machine.state not in _UP:
                    continue
                if core.leadership.valid() and life.state not in ("ending", "ended") and not life.gone:
                    await self._extend(life, machine.ref)
            await asyncio.sleep(min(core.settings.list_rest_s, limit_s / EXTENDS / 4))

    async def _extend(self, life: Life, ref: Ref) -> None:
        account = self.core.accounts.get(life.key)
        if account is None or not isinstance(account.provider, Extends):
            return
        await account.budget.take(Urgency.RENT)
        try:
            async with asyncio.timeout(account.call_timeout_s):
                await account.provider.extend(ref)
        except (ProviderError, TimeoutError) as error:
            self._failed(account, error, what="extend", ref=ref)
        else:
            life.extended_at = self.core.clock()

    async def _flush(self) -> None:
        batch, self._pending = self._pending, []
        if not batch:
            return
        try:
            await self._record(sorted(batch, key=lambda each: (each.owner_uid, each.claim_uid)))
        except asyncio.CancelledError:  # a caller may go, and others' failures with it; twice does no harm
            self._pending += batch
            raise

    async def _record(self, batch: Sequence[Failure]) -> None:
        """Write them together; one that Postgres refuses must not keep the others from being written."""
        settings = self.core.settings
        pace = Pace(
            base_s=settings.restart_base_s, max_s=settings.restart_max_s, reset_s=settings.restart_reset_s
        )
        try:
            async with begin(self.core.engine) as conn:
                for failure in batch:
                    until = await backoffs.note(conn, failure, pace=pace)
                    log.info("owner waits", owner=failure.owner_uid, until=str(until), why=failure.message)
        except StoreUnavailable as error:
            self._pending += batch
            log.info("owner's wait not recorded yet", error=str(error)[:256])
        except DBAPIError as error:
            if len(batch) == 1:
                log.error("an owner's wait was refused", error=str(error.orig), owner=batch[0].owner_uid)
                return
            for failure in batch:
                await self._record([failure])

    def _machine(self, claim: ClaimSpec) -> tuple[Life, Account, Ref] | None:
        """The recorded machine of a rental that is not in release, and the account to ask."""
        life, account = self.core.lives.get(claim.uid), self.core.accounts.get(claim.key)
        if life is None or account is None or life.ref is None or life.gone:
            return None
        return None if life.state in ("ending", "ended") else (life, account, life.ref)

    def _failed(self, account: Account, error: Exception, *, what: str, ref: Ref) -> None:
        if isinstance(error, Throttled):
            account.budget.pause(error.retry_after_s)
        unknown = isinstance(error, OutcomeUnknown | TimeoutError)
        text = str(error) or type(error).__name__
        log.warning(f"{what} failed", resource=ref.resource_id, unknown=unknown, error=text)


async def _forget(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass
