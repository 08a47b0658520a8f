"""The poll clock, and what may be concluded from it.

Invariants:

* a round of a place (provider, account, list region) is complete only when every page arrived, the account is
  the recorded one, and no unexplained shrink was seen; everything else is unknown and proves nothing absent;
* a machine is remembered from the first round of any kind that shows it; only two complete rounds without it,
  and then a get by id (the caller's), say that it is gone;
* moments are those of ``time.monotonic``, taken before the list was asked for, so that "began after" is safe.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.inventory.identity import Identity, parse
from app.settings import Settings
from providers.base import ClaimUid, Machine, ProviderError, Ref, ResourceId, Round, Throttled

log = structlog.get_logger()

AccountKey = tuple[str, str]
SHRINK = 0.3  # a list that lost more than this share of our machines at once is a symptom, not news
PROBES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one list answers for. ``region`` is "" where a cloud lists all regions at once."""

    provider: str
    account: str
    region: str


@dataclass(slots=True, kw_only=True)
class Known:
    """One machine of this installation, as last shown. ``shown_at`` is the begin of that round."""

    machine: Machine
    identity: Identity
    place: Place
    first_shown_at: float
    shown_at: float

    @property
    def ref(self) -> Ref:
        return self.machine.ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One judged round: ``unknown`` is None when it is complete. ``claims`` are those it showed."""

    place: Place
    account_id: str | None
    began_at: float
    ended_at: float
    machines: tuple[Machine, ...]
    claims: frozenset[ClaimUid]
    unknown: str | None


@dataclass(slots=True)
class _PlaceState:
    complete: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    ours: dict[ResourceId, Ref] = field(default_factory=dict)
    unknown: str | None = None


class Inventory:
    """Polls every open account and remembers this installation's machines by claim.

    ``scope`` names the exact regions that pools, live claims and rentals of an account may use.
    ``recorded_account`` gives the cloud's id of the account that our open runs are in: None while the store
    cannot tell, "" when there is none. With neither that nor an agreement, rounds stay unknown.
    ``prepare`` is awaited before an account is first listed.
    """

    def __init__(
        self,
        *,
        accounts: Accounts,
        installation: str,
        settings: Settings,
        scope: Callable[[AccountKey], Iterable[str]],
        recorded_account: Callable[[AccountKey], str | None],
        prepare: Callable[[Account], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounts, self._installation, self._settings = accounts, installation, settings
        self._scope, self._recorded_account, self._clock = scope, recorded_account, clock
        self._prepare = prepare
        self._places: dict[Place, _PlaceState] = {}
        self._known: dict[tuple[str, str, ResourceId], Known] = {}
        self._by_claim: dict[ClaimUid, set[tuple[str, str, ResourceId]]] = {}
        self._doubts: dict[Place, dict[ResourceId, tuple[Identity, float]]] = {}
        self._ending: set[tuple[str, str, ResourceId]] = set()
        self._busy: dict[AccountKey, set[ClaimUid]] = {}
        self._wake: dict[AccountKey, asyncio.Event] = {}
        self._listeners: list[Callable[[Judged], None]] = []
        self.highest_sequence = 0

    # --- what others ask ---

    def place(self, key: AccountKey, region: str) -> Place | None:
        """The place whose list shows a machine rented in ``region``; None while the account is not open."""
        account = self._accounts.get(key)
        if account is None:
            return None
        return Place(provider=key[0], account=key[1], region=region if account.traits.lists_by_region else "")

    def of_claim(self, uid: ClaimUid) -> list[Known]:
        """Every machine of the claim that any round has shown and nobody has proven gone, oldest first."""
        found = [self._known[key] for key in self._by_claim.get(uid, ())]
        return sorted(
            found, key=lambda known: (known.identity.sequence, known.first_shown_at, known.ref.resource_id)
        )

    def claims(self) -> frozenset[ClaimUid]:
        """The claims of all remembered machines."""
        return frozenset(self._by_claim)

    def known(self, ref: Ref) -> Known | None:
        return self._known.get(_key(ref))

    def two_complete(self, place: Place, *, first_after: float, later_after: float) -> float | None:
        """The begin of the earlier of the place's last two complete rounds, if both began late enough."""
        rounds = self._places.get(place, _PlaceState()).complete
        if len(rounds) == 2 and rounds[0] >= first_after and rounds[1] >= later_after:
            return rounds[0]
        return None

    def absent(self, uid: ClaimUid, place: Place, *, first_after: float, later_after: float) -> bool:
        """True when two complete rounds, begun late enough, showed no machine of the claim that exists."""
        earlier = self.two_complete(place, first_after=first_after, later_after=later_after)
        if earlier is None:
            return False
        return not any(
            known.place == place and known.machine.exists and known.shown_at >= earlier
            for known in self.of_claim(uid)
        )

    def doubts(self, uid: ClaimUid, place: Place, *, sequences: Iterable[int]) -> list[ResourceId]:
        """The machines that one of the attempts with these sequences may have made, and that may as well be
        somebody's copies (`Machine.maybe`).

        Each counts until a complete round does not show it so any more.
        """
        wanted = frozenset(sequences)
        return sorted(
            resource_id
            for resource_id, (identity, _) in self._doubts.get(place, {}).items()
            if identity.claim_uid == uid and identity.sequence in wanted
        )

    def now(self) -> float:
        """This inventory's clock."""
        return self._clock()

    # --- what others tell ---

    def on_round(self, listener: Callable[[Judged], None]) -> None:
        self._listeners.append(listener)

    def stir(self, key: AccountKey, uid: ClaimUid) -> None:
        """Something of this claim is about to change: list at the busy pace, beginning now."""
        busy = self._busy.setdefault(key, set())
        if uid not in busy:
            busy.add(uid)
            self._event(key).set()

    def settle(self, key: AccountKey, uid: ClaimUid) -> None:
        """Nothing is expected to change for this claim any more."""
        self._busy.get(key, set()).discard(uid)

    def expect(self, place: Place, refs: Iterable[Ref]) -> None:
        """What earlier processes saw in the place: a first list without it is a shrink to be explained."""
        state = self._places.setdefault(place, _PlaceState())
        if not state.complete:
            state.ours = {ref.resource_id: ref for ref in refs}

    def expect_end(self, ref: Ref) -> None:
        """A terminate was accepted: this machine's absence will need no explanation."""
        self._ending.add(_key(ref))

    def learn(self, machine: Machine) -> None:
        """A get or a create's answer showed a machine of ours between rounds."""
        identity = self._ours(machine)
        if identity is not None:
            place = self.place((machine.ref.provider, machine.ref.account), machine.ref.region)
            if place is not None:
                self._remember(machine, identity, place, self._clock())

    def forget(self, ref: Ref) -> None:
        """The machine is proven gone."""
        key = _key(ref)
        self._ending.discard(key)
        known = self._known.pop(key, None)
        if known is not None:
            claim = self._by_claim.get(known.identity.claim_uid, set())
            claim.discard(key)
            if not claim:
                self._by_claim.pop(known.identity.claim_uid, None)

    # --- the clock ---

    async def run(self) -> None:
        """Poll until cancelled, each account at its own pace."""
        opened: asyncio.Queue[Account] = asyncio.Queue()  # whoever opens accounts may outlive this
        self._accounts.on_open(opened.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            while True:
                account = await opened.get()
                tasks.create_task(self._poll(account), name=f"poll-{account.name}")

    def _event(self, key: AccountKey) -> asyncio.Event:
        return self._wake.setdefault(key, asyncio.Event())

    async def _poll(self, account: Account) -> None:
        wake = self._event(account.key)
        await self._prepare(account)
        while True:
            wake.clear()
            began = self._clock()
            try:
                await self.poll_once(account)
            except Exception:  # a broken adapter must not stop the clock of the others
                log.exception("list round failed", provider=account.name, account=account.account)
            await self._pause(account, began, wake)

    async def _pause(self, account: Account, began: float, wake: asyncio.Event) -> None:
        """Sleep until the next round is due; becoming busy meanwhile brings it forward."""
        while True:
            busy = bool(self._busy.get(account.key))
            pace = self._settings.list_busy_s if busy else self._settings.list_rest_s
            left = began + max(account.traits.list_every_s, pace) - self._clock()
            if left <= 0:
                return
            if busy:
                await asyncio.sleep(left)
                return
            try:
                async with asyncio.timeout(left):
                    await wake.wait()  # never by wait_for: before 3.12 it loses a cancel that meets a wake
            except TimeoutError:
                return
            wake.clear()

    async def poll_once(self, account: Account) -> None:
        """One list of the account, judged and remembered place by place."""
        regions = frozenset(self._scope(account.key)) if account.traits.lists_by_region else frozenset({""})
        await account.budget.take(Urgency.LIST)
        began = self._clock()
        try:
            async with asyncio.timeout(account.call_timeout_s * 4):  # many pages, each bounded by the adapter
                rounds = await account.provider.list(regions)
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            rounds = _all_unknown(regions, str(error))
        except (ProviderError, TimeoutError) as error:
            rounds = _all_unknown(regions, str(error) or type(error).__name__)
        account.budget.charge(sum(one.calls for one in rounds) - 1)
        answered = {one.region for one in rounds}
        missing = _all_unknown(regions - answered, "the region was not answered")
        for one in (*rounds, *missing):
            await self._take(account, one, began)

    async def _take(self, account: Account, one: Round, began: float) -> None:
        place = Place(provider=account.name, account=account.account, region=one.region)
        ours = [(machine, identity) for machine in one.machines if (identity := self._ours(machine))]
        unknown = one.unknown or self._wrong_account(account, one)
        if self._wrong_account(account, one) and self._recorded_account(account.key) is not None:
            ours = []  # another account's answer shows nothing of ours, whatever it looks like
        state = self._places.setdefault(place, _PlaceState())
        shown = {machine.ref.resource_id: machine.ref for machine, _ in ours if machine.exists}
        if unknown is None:
            listed = {machine.ref.resource_id for machine in one.machines if machine.exists}
            unknown = await self._unexplained_shrink(account, state, shown, listed)
        for machine, identity in ours:
            self._remember(machine, identity, place, began)
        self._doubt(place, one.machines, began, complete=unknown is None)
        if unknown is None:
            state.complete.append(began)
            state.ours = shown
        judged = Judged(
            place=place,
            account_id=one.account_id,
            began_at=began,
            ended_at=self._clock(),
            machines=one.machines if not self._wrong_account(account, one) else (),
            claims=frozenset(identity.claim_uid for _, identity in ours),
            unknown=unknown,
        )
        if unknown != state.unknown:  # said once, not every second
            state.unknown = unknown
            log.info("list round", provider=place.provider, region=place.region, unknown=unknown)
        for listener in self._listeners:
            listener(judged)

    def _ours(self, machine: Machine) -> Identity | None:
        identity = parse(machine.identity)
        return identity if identity and identity.installation == self._installation else None

    def _doubt(self, place: Place, machines: Iterable[Machine], began: float, *, complete: bool) -> None:
        doubts = self._doubts.setdefault(place, {})
        for machine in machines:
            identity = parse(machine.maybe)
            if identity is not None and identity.installation == self._installation and machine.exists:
                doubts[machine.ref.resource_id] = (identity, began)
                self.highest_sequence = max(self.highest_sequence, identity.sequence)
        if complete:
            for resource_id in [one for one, (_, at) in doubts.items() if at < began]:
                del doubts[resource_id]

    def _wrong_account(self, account: Account, one: Round) -> str | None:
        recorded = self._recorded_account(account.key)
        if recorded is None:
            return "the account is not confirmed: the store cannot tell which one our machines are in"
        expected = recorded or account.account_id
        if one.account_id != expected:
            return f"account {one.account_id} answered, our machines are in {expected}"
        return None

    async def _unexplained_shrink(
        self, account: Account, state: _PlaceState, shown: dict[ResourceId, Ref], listed: set[ResourceId]
    ) -> str | None:
        """Why the list cannot be believed. ``listed``: every id that it shows, whoever's."""
        vanished = []
        for resource_id, ref in state.ours.items():
            known = self._known.get(_key(ref))
            ended = known is not None and known.machine.end is not None
            if resource_id not in shown and _key(ref) not in self._ending and not ended:
                vanished.append(ref)
        if len(vanished) <= SHRINK * len(state.ours):
            return None
        for ref in vanished[:PROBES]:
            await account.budget.take(Urgency.LIST)
            try:
                async with asyncio.timeout(account.call_timeout_s):
                    machine = await account.provider.get(ref)
            except (ProviderError, TimeoutError) as error:
                return f"{len(vanished)} of {len(state.ours)} machines missing, and a probe failed: {error}"
            if machine is None or not machine.exists:
                continue
            # Listed by its id, and a get finds no identity of ours either: it was edited, and is not missing.
            if ref.resource_id not in listed or self._ours(machine) is not None:
                return f"{len(vanished)} of {len(state.ours)} missing, but {ref.resource_id} is there"
        return None

    def _remember(self, machine: Machine, identity: Identity, place: Place, at: float) -> None:
        key = _key(machine.ref)
        self.highest_sequence = max(self.highest_sequence, identity.sequence)
        known = self._known.get(key)
        if known is not None:
            if at >= known.shown_at:  # a get may have overtaken the list
                known.machine, known.place, known.shown_at = machine, place, at
            return
        if not machine.exists and identity.claim_uid not in self._busy.get(
            (place.provider, place.account), ()
        ):
            return  # history of a machine that nobody has a question about
        self._known[key] = Known(
            machine=machine, identity=identity, place=place, first_shown_at=at, shown_at=at
        )
        self._by_claim.setdefault(identity.claim_uid, set()).add(key)


def _key(ref: Ref) -> tuple[str, str, ResourceId]:
    return (ref.provider, ref.account, ref.resource_id)


def _all_unknown(regions: Iterable[str], why: str) -> list[Round]:
    return [Round(region=region, account_id=None, machines=(), unknown=why) for region in sorted(regions)]
