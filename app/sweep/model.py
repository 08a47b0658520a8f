"""What a sweep knows and what it says: facts in, findings out. Values only; nothing here asks anybody.

Times are aware UTC on the database's clock unless the name says ``provider_``; durations end in ``_s``; money
is `Decimal` dollars an hour, None where nobody knows the price, never zero for that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum

from app.inventory.identity import Identity
from app.settings import Settings
from providers.base import ClaimUid, MachineState, Ref, ResourceId

AccountKey = tuple[str, str]
MachineKey = tuple[str, str, ResourceId]


class Kind(StrEnum):
    """What is wrong. The values are what commands and rows show; docs/orphans.md has the table."""

    NO_CLAIM = "no-claim"
    CLAIM_WITHOUT_MACHINE = "claim-without-machine"
    CLAIM_WITHOUT_POD = "claim-without-pod"
    RENTAL_ONLY = "rental-only"
    DUPLICATE = "duplicate"
    STALE_ATTEMPT = "stale-attempt"
    DAMAGED = "identity-damaged"
    TERMINATING_SLOW = "terminating-slow"
    STOPPED_BILLING = "stopped-billing"
    LEFTOVER_PART = "leftover-part"
    STUCK = "stuck-before-create"
    RUN_OPEN = "run-open"
    PROVIDER_REMOVED = "provider-removed"


class By(StrEnum):
    """Who does something about a finding. Nobody else may: one way in."""

    SWEEP = "sweep"  # we decide, under every rail; provisioning's release carries it out
    PROVISIONING = (
        "provisioning"  # its rows know the claim: extras, late machines, rentals whose claim is gone
    )
    CLAIMS = "claims"
    PERSON = "person"


class Next(StrEnum):
    """What happens to a finding now."""

    TERMINATE = "terminate"
    WAIT = "wait"  # a rail that time alone satisfies
    BLOCKED = "blocked"  # a rail that needs something to change: a person, a whole list
    REPORT = "report"
    PROTECT = "protect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one account, from what its adapter declares and our settings. Seconds."""

    grace_s: float
    interval_s: float
    launch_s: float
    ending_s: float
    terminate_s: float
    part_grace_s: float

    @property
    def orphan_s(self) -> float:
        """Within this an orphan of ours has ended, once its cloud answers and no rail blocks."""
        return self.grace_s + 2 * self.interval_s + self.terminate_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One machine in its place's newest list. ``was_ours``: the claim that an earlier list named on it."""

    ref: Ref
    raw_identity: str | None
    identity: Identity | None
    state: MachineState
    provider_created_at: datetime | None
    first_seen_at: datetime
    usd_per_hour: Decimal | None
    listed_at: datetime  # the list began then: what happened since it does not show
    was_ours: ClaimUid | None = None

    @property
    def key(self) -> MachineKey:
        return (self.ref.provider, self.ref.account, self.ref.resource_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFact:
    """The newest list of one place. ``unknown`` None: complete."""

    provider: str
    account: str
    region: str
    unknown: str | None
    machines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFact:
    """One claim that exists. ``pod_exists`` None: nobody could tell."""

    uid: ClaimUid
    name: str
    namespace: str
    pod: str
    provider: str
    account: str
    created_at: datetime
    deleting: bool = False
    pod_exists: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalFact:
    """One rental row. ``unsettled``: an order may have been taken and nobody knows yet."""

    uid: ClaimUid
    name: str
    namespace: str
    pod: str
    provider: str
    account: str
    state: str
    created_at: datetime
    resource_id: ResourceId | None = None
    attempt: int | None = None  # of the recorded machine
    unsettled: bool = False
    ending_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFact:
    """One recorded machine. Times are ours."""

    uid: ClaimUid
    ref: Ref
    usd_per_hour: Decimal | None = None
    namespace: str = ""
    pod: str = ""
    accepted_at: datetime | None = None
    exited_at: datetime | None = None
    terminate_asked_at: datetime | None = None
    gone_at: datetime | None = None
    provider_created_at: datetime | None = None

    @property
    def key(self) -> MachineKey:
        return (self.ref.provider, self.ref.account, self.ref.resource_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Somebody's word that a machine stays until ``until``."""

    until: datetime
    reason: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """An open finding as earlier sweeps left it. ``mark`` is reason and state: another one counts anew."""

    finding_id: int
    kind: Kind
    mark: str
    first_seen_at: datetime
    marked_at: datetime
    sightings: int
    approved_at: datetime | None = None
    executed_at: datetime | None = None
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What holds for the whole sweep. Each text says why nothing is ended now; None: nothing speaks against.

    ``report``: the setting, or the time after an install or upgrade; an approval overrides it. ``held``: the
    database is older than the world; only `nebula hold release` lifts it. ``not_leader``: we have not led
    long enough. ``claims_unread``: the API server has not told which claims exist.
    """

    report: str | None = None
    held: str | None = None
    not_leader: str | None = None
    claims_unread: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The ceiling of one sweep: the larger of a number and a share of the machines that are known.

    ``volumes``: whether a volume that was made for one claim may go after it. Data is not compute.
    """

    machines: int = 5
    share: float = 0.10
    approval_s: float = 3600.0
    volumes: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        """Those that the settings name."""
        return cls(
            machines=settings.sweep_max_machines,
            share=settings.sweep_max_share,
            approval_s=settings.sweep_approval_s,
            volumes=settings.sweep_volumes == "delete",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that one sweep judges. The lists were read before the claims, and those before the rows."""

    installation: str
    now: datetime
    places: Mapping[AccountKey, tuple[PlaceFact, ...]]
    machines: tuple[Sighting, ...]
    claims: Mapping[ClaimUid, ClaimFact]
    rentals: Mapping[ClaimUid, RentalFact]
    runs: Mapping[MachineKey, RunFact]
    bounds: Mapping[AccountKey, Bounds]  # of the configured accounts
    protections: Mapping[MachineKey, Protection] = field(default_factory=dict)
    memory: Mapping[str, Memory] = field(default_factory=dict)
    owners: Mapping[ClaimUid, "Owner"] = field(default_factory=dict)  # as the watch once showed the claims
    lost: frozenset[MachineKey] = frozenset()  # recorded machines that complete lists have left out for long
    mode: Mode = Mode()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rail, as held against one finding. ``until``: when time alone will satisfy it."""

    name: str
    passed: bool
    detail: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whom it belongs or belonged to, as well as can be told. Empty: nobody knows."""

    namespace: str = ""
    pod: str = ""
    gone: bool = False

    def __str__(self) -> str:
        if not self.pod:
            return "-"
        return f"{self.namespace}/{self.pod}" + (" (gone)" if self.gone else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and what happens to it now."""

    kind: Kind
    provider: str
    account: str
    region: str
    resource_id: ResourceId | None
    claim_uid: ClaimUid | None
    attempt: int | None
    raw_identity: str | None
    state: str
    why: str
    owner: Owner
    by: By
    next: Next
    since: datetime  # it exists, and costs, since then
    counted_from: datetime | None = None  # its grace counts from then; None: from `since`
    provider_created_at: datetime | None = None
    usd_per_hour: Decimal | None = None
    cost_so_far: Decimal | None = None
    rules: tuple[Rule, ...] = ()
    blocked_by: str | None = None
    eligible_at: datetime | None = None
    sightings: int = 1
    first_seen_at: datetime | None = None
    finding_id: int | None = None

    @property
    def key(self) -> str:
        """The same for the same thing, sweep after sweep."""
        return f"{self.kind}|{self.provider}|{self.account}|{self.resource_id or self.claim_uid}"

    @property
    def mark(self) -> str:
        """What must stay the same between two sightings."""
        return f"{self.why}|{self.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOurs:
    """Machines that are never touched, counted. ``installation`` None: without any identity of ours."""

    provider: str
    account: str
    installation: str | None
    machines: int
    usd_per_hour: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One sweep's result. ``blocked``: how many findings each rail holds back."""

    findings: tuple[Finding, ...]
    not_ours: tuple[NotOurs, ...]
    ours: int
    incomplete: tuple[PlaceFact, ...]
    blocked: Mapping[str, int]
    ceiling: int

    def to_terminate(self) -> tuple[Finding, ...]:
        """What the sweep itself ends now."""
        return tuple(one for one in self.findings if one.next is Next.TERMINATE and one.by is By.SWEEP)


def cost_so_far(usd_per_hour: Decimal | None, *, since: datetime, now: datetime) -> Decimal | None:
    """Dollars from ``since`` on at this price: an estimate, the ledger has the truth. None when unpriced."""
    if usd_per_hour is None:
        return None
    lived = max(now - since, timedelta())
    micros = lived.days * 86_400_000_000 + lived.seconds * 1_000_000 + lived.microseconds
    return usd_per_hour * Decimal(micros) / Decimal(3_600_000_000)
