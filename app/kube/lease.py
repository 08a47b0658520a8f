"""Leadership on a Kubernetes Lease of our own, and the epoch that goes with it.

Why a leader can trust `Term.valid`:

- A holder believes in its Lease for ``deadline_s`` counted from *before* the renewal that succeeded was sent.
- Anybody else takes over only after the record has stood still for the holder's full duration, which is
  longer, counted from *after* it was read. Each counts on its own clock; clocks are never compared.
- Taking over is one update on condition of the resourceVersion that was just read; it writes epoch + 1.

So at most one process is valid at any time, and no epoch is used twice while the Lease lives; should
somebody delete it, the highest epoch that this process ever saw, and Postgres through `Term.raise_epoch`,
keep it from falling. The clock goes on while the machine is suspended: a process that was stopped finds its
term over in the moment it goes on.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import structlog

from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, Exists, KubeError, Replaced

log = structlog.get_logger()

EPOCH = "nebula.inftyai.com/epoch"
LEASE = "nebula.inftyai.com"

DURATION_S = 15.0
DEADLINE_S = 10.0
RENEW_S = 2.0


def boot_clock() -> float:
    """Seconds that go on while the machine is suspended, where the system counts them."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class TermOver(Exception):
    """We do not lead any more: stop what only a leader may do."""


class Term:
    """One unbroken leadership. Made by `Election`; handed to the duties."""

    def __init__(self, election: "Election", *, epoch: int, valid_until: float) -> None:
        self._election = election
        self._epoch = epoch
        self._valid_until = valid_until
        self._over = False

    @property
    def epoch(self) -> int:
        """Higher than that of every earlier leader. Grows only by `raise_epoch`."""
        return self._epoch

    def valid(self) -> bool:
        """Whether nobody else can lead now. Ask right before what only a leader may do; it costs nothing."""
        return self.remaining_s() > 0

    def remaining_s(self) -> float:
        """Seconds for which this is valid even if no renewal succeeds; never negative."""
        return 0.0 if self._over else max(0.0, self._valid_until - self._election.clock())

    async def raise_epoch(self, minimum: int) -> int:
        """Make the epoch at least ``minimum``, on the Lease first, and return it.

        Raises:
            TermOver: we do not lead any more.
            KubeError: the Lease was not written; the epoch is what it was, and asking again is safe.
        """
        return await self._election._raise_epoch(self, minimum)


@dataclass(slots=True)
class _Seen:
    """A foreign holder's record and since when, by our clock, it has stood still."""

    record: tuple[Any, ...]
    since: float
    duration_s: float
    holder: str


class Election:
    """One candidate. ``identity`` tells people who leads; a random suffix keeps two processes apart.

    ``duration_s`` is how long others wait, ``deadline_s`` (less) how long a holder believes without renewal,
    ``renew_s`` the pause between renewals and between looks. ``stop_s`` before the deadline the duties of a
    holder that cannot renew are cancelled. ``overdue`` is called once if they have not ended ``stop_s`` after
    they were cancelled: the process should end then.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        identity: str,
        name: str = LEASE,
        duration_s: float = DURATION_S,
        deadline_s: float = DEADLINE_S,
        renew_s: float = RENEW_S,
        stop_s: float | None = None,
        overdue: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        if not 0 < renew_s < deadline_s < duration_s:
            raise ValueError("a Lease needs renew < deadline < duration")
        stop_s = min(2.0, deadline_s / 4) if stop_s is None else stop_s
        if not 0 < stop_s < deadline_s:
            raise ValueError("the duties of a leader must have time to stop, and to run")
        self.clock = clock
        self.looks = 0  # how often the Lease was read by a candidate
        self.renewals = 0
        self.identity = f"{identity}_{uuid4().hex[:12]}"
        self._kube = kube.room("lease", urgent=True)
        self._namespace, self._name = namespace, name
        self._path = paths.lease(namespace, name)
        self._duration_s, self._deadline_s, self._renew_s = duration_s, deadline_s, renew_s
        self._stop_s = stop_s
        self._overdue = overdue
        self._lock = asyncio.Lock()  # one write at a time: renewals and raise_epoch share the version
        self._lease: Obj = {}  # as last written by us
        self._term: Term | None = None
        self._seen: _Seen | None = None
        self._highest = 0  # epoch that we know of
        self._raising = 0  # the epoch of a raise_epoch whose answer may have been lost

    @property
    def term(self) -> Term | None:
        """Our term while we lead."""
        return self._term if self._term and self._term.valid() else None

    @property
    def leader(self) -> str:
        """Who holds the Lease as far as we know; empty if nobody does."""
        if self._term:
            return self.identity
        return self._seen.holder if self._seen else ""

    async def run(self, lead: Callable[[Term], Awaitable[None]]) -> None:
        """Stand for election until cancelled; call ``lead`` for each term, and cancel it when the term ends.

        Returns when ``lead`` returns, and raises what it raises; the Lease is released first. A new term
        never begins while ``lead`` of an older one still runs.
        """
        while True:
            term = await self._acquire()
            log.info("leadership won", epoch=term.epoch, identity=self.identity)
            if await self._lead(term, lead):
                return

    async def _lead(self, term: Term, lead: Callable[[Term], Awaitable[None]]) -> bool:
        """Hold the term while ``lead`` runs. True when that ended by itself."""
        duties = asyncio.ensure_future(lead(term))
        keeper = asyncio.create_task(self._keep(term), name="lease-renewal")
        try:
            await asyncio.wait((duties, keeper), return_when=asyncio.FIRST_COMPLETED)
            if duties.done():
                duties.result()
                return True
            log.warning("leadership lost", epoch=term.epoch, why=keeper.result())
            return False
        finally:
            try:
                await self._stop(term, duties)
            finally:
                keeper.cancel()
                await asyncio.wait((keeper,))
                await self._release(term)

    async def _stop(self, term: Term, duties: "asyncio.Future[None]") -> None:
        """Cancel the duties and wait for their end, however long: the next term must not begin before it."""
        if duties.done():
            return
        duties.cancel()
        alarmed = cancelled = False
        while not duties.done():
            try:
                await asyncio.wait((duties,), timeout=self._stop_s)
            except asyncio.CancelledError:
                cancelled = True  # passed on below: the duties must not run on behind our back
            if not alarmed and not duties.done() and not term.valid():
                alarmed = True
                log.error("leader's duties have not stopped in time", epoch=term.epoch)
                self._overdue()
        if not duties.cancelled() and (error := duties.exception()):
            log.error("leader's duties failed while stopping", exc_info=error)
        if cancelled:
            raise asyncio.CancelledError

    async def _acquire(self) -> Term:
        while True:
            try:
                async with asyncio.timeout(self._deadline_s):
                    if term := await self._try():
                        return term
            except (Conflict, Exists, Replaced):
                pass  # somebody else was quicker
            except (KubeError, TimeoutError) as error:
                log.warning("lease not read", lease=self._name, error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._pause_s())

    async def _try(self) -> Term | None:
        """Look at the Lease, and take it if it is free or its holder has been silent for long enough."""
        lease = await self._kube.find(self._path)
        self.looks += 1
        if lease is None:
            return None if self._must_wait() else await self._take(None)
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        self._highest = max(self._highest, _epoch(lease))
        if not holder or holder == self.identity:
            return await self._take(lease)
        record = (lease["metadata"]["uid"], holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if self._seen is None or self._seen.record != record:
            promised_s = float(spec.get("leaseDurationSeconds") or self._duration_s)
            self._seen = _Seen(record=record, since=self.clock(), duration_s=promised_s, holder=holder)
            return None
        return None if self._must_wait() else await self._take(lease)

    def _must_wait(self) -> bool:
        return self._seen is not None and self.clock() - self._seen.since < self._seen.duration_s

    async def _take(self, lease: Obj | None) -> Term:
        epoch = self._highest + 1
        transitions = ((lease or {}).get("spec") or {}).get("leaseTransitions") or 0
        spec = self._record() | {"acquireTime": _micro_time(), "leaseTransitions": transitions + 1}
        sent_at = self.clock()
        if lease is None:
            metadata: Obj = {"name": self._name, "namespace": self._namespace}
            metadata["annotations"] = {EPOCH: str(epoch)}
            new = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
            self._lease = await self._kube.create(paths.leases(self._namespace), new)
        else:
            self._lease = await self._kube.replace(self._path, _with_epoch(lease, epoch) | {"spec": spec})
        self._highest = epoch
        self._seen = None
        self._term = Term(self, epoch=epoch, valid_until=sent_at + self._deadline_s)
        return self._term

    async def _keep(self, term: Term) -> str:
        """Renew until the term is over; returns why."""
        try:
            while (left_s := term.remaining_s() - self._stop_s) > 0:
                await asyncio.sleep(min(self._pause_s(), left_s))
                left_s = term.remaining_s() - self._stop_s
                if left_s > 0:
                    await self._try_renewal(term, within_s=min(left_s, max(self._deadline_s / 3, 0.5)))
        except TermOver as error:
            term._over = True
            return str(error)
        except Exception:
            term._over = True
            raise
        term._over = True
        return "not renewed in time"

    async def _try_renewal(self, term: Term, *, within_s: float) -> None:
        """Several tries fit before the deadline, so one that hangs is given up early."""
        try:
            async with asyncio.timeout(within_s), self._lock:
                await self._renew(term)
        except (KubeError, TimeoutError) as error:
            left_s = round(term.remaining_s(), 1)
            log.warning("lease not renewed", left_s=left_s, error=f"{type(error).__name__}: {error}")

    async def _renew(self, term: Term) -> None:
        sent_at = self.clock()
        try:
            await self._write(self._record() | _kept(self._lease))
        except Conflict:
            await self._read_again(term)
            sent_at = self.clock()
            await self._write(self._record() | _kept(self._lease))
        except Replaced as error:
            raise TermOver("the Lease was deleted") from error
        term._valid_until = sent_at + self._deadline_s
        self.renewals += 1

    async def _read_again(self, term: Term) -> None:
        """After a conflict: was it a write of ours whose answer was lost, a person's label, or a rival?"""
        try:
            lease = await self._kube.get(self._path)
        except Replaced as error:
            raise TermOver("the Lease was deleted") from error
        self._highest = max(self._highest, _epoch(lease))
        if (lease.get("spec") or {}).get("holderIdentity") != self.identity:
            raise TermOver("another holds the Lease")
        if _epoch(lease) < term.epoch:
            raise TermOver("the epoch was set back")
        if _epoch(lease) > term.epoch and _epoch(lease) != self._raising:
            raise TermOver("somebody else raised the epoch")
        self._lease = lease

    async def _raise_epoch(self, term: Term, minimum: int) -> int:
        try:
            async with asyncio.timeout(term.remaining_s()), self._lock:
                if minimum > term.epoch:
                    self._raising = max(minimum, self._raising)
                    await self._write_epoch(term, self._raising)
                    term._epoch = self._highest = self._raising
        except TimeoutError as error:
            raise TermOver("the term ended before the epoch was written") from error
        if not term.valid():
            raise TermOver("the term is over")
        return term.epoch

    async def _write_epoch(self, term: Term, epoch: int) -> None:
        try:
            await self._write(self._lease["spec"], epoch=epoch)
        except Conflict:
            await self._read_again(term)
            await self._write(self._lease["spec"], epoch=epoch)
        except Replaced as error:
            raise TermOver("the Lease was deleted") from error

    async def _write(self, spec: Obj, *, epoch: int | None = None) -> None:
        """Replace the Lease on condition that it is the one we last saw."""
        lease = self._lease if epoch is None else _with_epoch(self._lease, epoch)
        self._lease = await self._kube.replace(self._path, lease | {"spec": spec})

    async def _release(self, term: Term) -> None:
        """Let another take over at once. Only called when the duties have ended."""
        held = not term._over and term.remaining_s() > 0
        term._over = True
        self._term = None
        if not held:
            return
        free = {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            async with asyncio.timeout(min(5.0, self._deadline_s)):
                try:
                    await self._write(self._record() | _kept(self._lease) | free)
                except Conflict:  # by a renewal that was cut off, or by a person
                    await self._read_again(term)
                    await self._write(self._record() | _kept(self._lease) | free)
            log.info("leadership released", epoch=term.epoch)
        except (KubeError, TermOver, TimeoutError) as error:
            log.warning("lease not released", error=f"{type(error).__name__}: {error}")

    def _record(self) -> Obj:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self._duration_s),
            "renewTime": _micro_time(),
        }

    def _pause_s(self) -> float:
        return self._renew_s * random.uniform(0.8, 1.2)


def _epoch(lease: Obj) -> int:
    text = (lease["metadata"].get("annotations") or {}).get(EPOCH, "0")
    try:
        return max(0, int(text))
    except ValueError:
        log.error("the Lease's epoch is not a number", epoch=text[:64])
        return 0


def _with_epoch(lease: Obj, epoch: int) -> Obj:
    annotations = (lease["metadata"].get("annotations") or {}) | {EPOCH: str(epoch)}
    return lease | {"metadata": lease["metadata"] | {"annotations": annotations}}


def _kept(lease: Obj) -> Obj:
    return {key: lease["spec"][key] for key in ("acquireTime", "leaseTransitions") if key in lease["spec"]}


def _micro_time() -> str:
    """For people and the API's type: nothing here reads it but for a change."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
