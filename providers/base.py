"""The provider contract: what an adapter offers, and the values that pass between it and the controller.

Adapters translate; they hold no policy. What is always true of the values here:

* a price is a list of meters in exact dollars (`Decimal`), never one float;
* every time is an aware UTC `datetime`, every duration ends in ``_s``;
* a `Ref` always carries provider, account and region, so that no call guesses where a machine lives;
* "could not ask" is an exception, "asked, and it is not there" a value; nobody may turn one into the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import NewType, Protocol, runtime_checkable

ClaimUid = NewType("ClaimUid", str)
PodUid = NewType("PodUid", str)
ResourceId = NewType("ResourceId", str)

DEFAULT_ACCOUNT = "default"


class Tier(StrEnum):
    """How a machine is bought. The values are those of ``NodePool.spec.capacityTypes``."""

    SPOT = "Spot"
    ON_DEMAND = "OnDemand"


class MeterKind(StrEnum):
    """What a meter counts: everything but ``bytes`` runs by the hour."""

    MACHINE = "machine"
    GPU = "gpu"
    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """One line of a price: ``quantity`` units at ``usd`` dollars a unit-hour (a GiB for ``bytes``).

    ``usd`` is None when the cloud names no believable price: unpriced, never zero.
    """

    kind: MeterKind
    quantity: Decimal
    usd: Decimal | None


def usd_per_hour(meters: Sequence[Meter]) -> Decimal | None:
    """Dollars an hour for the whole machine; None when any hourly meter is unpriced or there is no meter."""
    total = Decimal(0)
    hourly = [meter for meter in meters if meter.kind is not MeterKind.BYTES]
    for meter in hourly:
        if meter.usd is None:
            return None
        total += meter.quantity * meter.usd
    return total if hourly else None


# --- what is asked for ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A kind and how many of it. ``type`` keeps the user's casing; compare through `key`."""

    type: str
    count: int

    @property
    def key(self) -> str:
        """``type:count`` in lower case, the block and catalogue identity; ``h100:8``."""
        return f"{self.type.lower()}:{self.count}"

    def __str__(self) -> str:
        return f"{self.type}:{self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a cloud needs to run one Pod's container, resolved and free of Kubernetes.

    ``env`` carries secrets: it is left out of ``repr``, and its values are never logged.
    """

    image: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ports: tuple[int, ...] = ()
    working_dir: str | None = None
    cpu: Decimal | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    accelerator: Accelerator | None = None
    restart_policy: str = "Never"
    grace_s: int = 30
    active_deadline_s: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """One thing that can be rented: a shape, in a region, in a tier, at a price list.

    ``region`` is "" where the provider has no regions. ``shape`` is the provider's own id.
    """

    provider: str
    account: str
    region: str
    tier: Tier
    accelerator: Accelerator | None
    shape: str
    meters: tuple[Meter, ...]

    @property
    def usd_per_hour(self) -> Decimal | None:
        return usd_per_hour(self.meters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One intent to rent, already committed as a row and marked on the claim.

    ``identity`` becomes the machine's name and tag; ``token`` is the client token of idempotent creates.
    Both are the same on every replay of this attempt, and different for every other attempt ever made.
    """

    claim_uid: ClaimUid
    number: int
    sequence: int
    identity: str
    token: str
    account: str
    region: str
    tier: Tier
    ceiling_usd_per_hour: Decimal | None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The way into a rented VM, derived from (claim UID, attempt): never stored, so never in ``repr``."""

    ssh_public_key: str
    host_key: str = field(repr=False)
    callback_url: str | None = None
    callback_token: str | None = field(default=None, repr=False)


# --- what comes back -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Where one machine lives. ``region`` is the provider's own region, "" where it has none."""

    provider: str
    account: str
    region: str
    resource_id: ResourceId


class MachineState(StrEnum):
    """What the cloud says of a machine, from ordered to over.

    ``QUEUED``: accepted, no capacity committed. ``BOOTING``: capacity committed, not reachable yet.
    ``RUNNING``: reachable, not merely started. ``EXITED``: the workload is over, but the resource is still
    there and may still cost money. ``GONE``: the cloud keeps it only as history; nothing exists or bills.
    An unknown word of a cloud is ``BOOTING``.
    """

    QUEUED = "queued"
    BOOTING = "booting"
    RUNNING = "running"
    EXITED = "exited"
    GONE = "gone"


class EndReason(StrEnum):
    """Why a machine or its workload is over, as far as the cloud tells. ``UNKNOWN`` when it does not."""

    COMPLETED = "completed"  # the workload ended by itself; the code says how
    FAILED = "failed"  # the machine or its start failed
    PREEMPTED = "preempted"  # a spot reclaim
    TERMINATED = "terminated"  # somebody asked for it
    LIFETIME = "lifetime"  # the provider's longest life was reached
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How it ended. ``exit_code`` is None when the cloud does not tell: never read that as 0."""

    reason: EndReason
    exit_code: int | None = None
    message: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine as a list or a get shows it. ``identity`` is the raw name or tag, parsed elsewhere.

    ``created_at``, ``started_at`` and ``end.at`` are the provider's clock. ``meters`` are those running now.
    """

    ref: Ref
    identity: str | None
    state: MachineState
    created_at: datetime | None = None
    started_at: datetime | None = None
    end: End | None = None
    endpoint: str | None = None
    meters: tuple[Meter, ...] = ()
    host: str | None = None

    @property
    def exists(self) -> bool:
        """False once nothing is left that could run or bill."""
        return self.state is not MachineState.GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One answer to `Provider.list` for one list region.

    ``account_id`` is what the cloud calls the account that answered (or a marker of ours that only our
    account can show). ``unknown`` is None only when every page arrived and nothing failed; otherwise it says
    why absence proves nothing, and the machines are those that were seen all the same.
    """

    region: str
    account_id: str | None
    machines: tuple[Machine, ...]
    unknown: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The cloud took the order. ``reserved`` is False when it queued it without committing capacity.

    ``clock_offset_s`` is the provider's clock minus ours, from the response's Date header.
    """

    ref: Ref
    account_id: str | None = None
    reserved: bool = True
    meters: tuple[Meter, ...] = ()
    created_at: datetime | None = None
    clock_offset_s: float | None = None
    host: str | None = None


class RejectionKind(StrEnum):
    """Why a cloud refused, from its own documented codes, never from a bare HTTP status."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    AUTH = "auth"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    PRICE = "price"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScope:
    """What a refusal is true of. Each axis: None matches any value, a string only that value.

    An empty string is "not applicable" and matches only a candidate without that axis (a CPU-only Pod has
    accelerator ""). A scope with every axis None must say ``everything``: a whole provider is never blocked
    by an axis somebody forgot.
    """

    accelerator: str | None = None
    tier: Tier | None = None
    region: str | None = None
    host: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        narrow = any(axis is not None for axis in (self.accelerator, self.tier, self.region, self.host))
        if narrow == self.everything:
            raise ValueError("a block names at least one axis, or everything, and not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The cloud provably did not rent. ``scope`` is the narrowest that is true; None blocks no offering."""

    kind: RejectionKind
    message: str
    scope: BlockScope | None = None


class Terminated(StrEnum):
    """The answer to `Provider.terminate`. ``NOT_FOUND`` is not "gone" for an id that was never seen."""

    ACCEPTED = "accepted"
    NOT_FOUND = "not_found"


# --- errors --------------------------------------------------------------------------------------


class ProviderError(Exception):
    """A provider call failed. Subclasses say what the caller may do next."""


class OutcomeUnknown(ProviderError):
    """The call may or may not have taken effect: look before anything else is sent."""


class Throttled(ProviderError):
    """Provably not carried out; the provider asked for patience of ``retry_after_s``."""

    def __init__(self, retry_after_s: float, message: str = "") -> None:
        super().__init__(message or f"throttled for {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Unavailable(ProviderError):
    """A read, or a terminate, did not get a usable answer. It says nothing about any machine."""


class CredentialRejected(Unavailable):
    """The cloud does not accept our credential (now). Nothing follows for any machine."""


# --- the contract --------------------------------------------------------------------------------


class Completion(StrEnum):
    """What an adapter can tell of a workload's end, so that a Job is never placed where it cannot be seen."""

    CODE = "code"  # that it ended, and its exit code
    ENDED = "ended"  # that it ended
    NEVER = "never"  # nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an adapter declares instead of coding. Durations in seconds, rates in calls a second.

    ``settle_after_s``: how long after a create's last possible moment of effect the machine may stay out of
    a complete list. ``replay_for_s``: for how long after the first send the same token is idempotent (None:
    never send twice). ``list_every_s``: how often a list may begin at most. ``provision_deadline_s``: the
    longest a create call may take. ``boot_deadline_s``: from accepted to running.
    """

    tiers: frozenset[Tier]
    settle_after_s: float = 180.0
    replay_for_s: float | None = None
    list_every_s: float = 1.0
    calls_per_s: float = 10.0
    call_burst: int = 20
    call_timeout_s: float = 30.0
    provision_deadline_s: float = 90.0
    boot_deadline_s: float = 900.0
    completion: Completion = Completion.ENDED
    max_lifetime_s: float | None = None
    lists_by_region: bool = False
    needs_accelerator: bool = True
    enforces_egress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """How one configured provider is opened. ``options`` come from ``NEBULA_PROVIDERS``; credentials do not.

    ``settle_after_s`` and ``call_timeout_s`` override the adapter's declaration when set (tests, the demo).
    """

    name: str
    account: str = DEFAULT_ACCOUNT
    installation: str
    options: Mapping[str, str] = field(default_factory=dict)
    settle_after_s: float | None = None
    call_timeout_s: float | None = None


@runtime_checkable
class Provider(Protocol):
    """One account of one cloud.

    Every method may be called at any time and from many tasks at once. Retries inside an SDK are off, or
    carry the attempt's token.
    """

    @property
    def name(self) -> str:
        """The configured name, equal to ``providers[].name`` in a NodePool."""
        ...

    @property
    def traits(self) -> Traits: ...

    async def account(self) -> str:
        """The cloud's own id of the account behind our credential.

        Raises:
            CredentialRejected, Unavailable: it cannot be told now.
        """
        ...

    def validate(self, workload: Workload) -> str | None:
        """Why this cloud can never run the workload, naming the field and the fix; None if it can. Pure."""
        ...

    async def offers(self) -> Sequence[Offering]:
        """What can be rented, whether or not there is capacity now; prices where the cloud has them.

        Raises:
            Unavailable: the cloud did not answer; the caller keeps what it knew.
        """
        ...

    def quote(self, workload: Workload, offering: Offering) -> tuple[Meter, ...]:
        """The meters this workload would run on this offering, disk included. Pure."""
        ...

    async def provision(
        self,
        attempt: Attempt,
        workload: Workload,
        *,
        offering: Offering,
        access: Access | None,
        avoid: frozenset[str],
    ) -> Accepted | Rejection:
        """Send the create, once, carrying the attempt's identity and token; ``avoid`` names refused hosts.

        With an idempotent create, the same attempt answers with the machine that it made before.

        Raises:
            OutcomeUnknown: the order may have been taken.
            Throttled: it provably was not.
        """
        ...

    async def list(self, regions: frozenset[str]) -> Sequence[Round]:
        """Every machine of the account, ours or not, one `Round` for each list region.

        ``regions`` are those with pools, live claims or rentals; an adapter whose list is global answers one
        round with region "". A page, region or field that failed makes that round unknown, not shorter.

        Raises:
            Unavailable, Throttled: nothing is known of any region.
        """
        ...

    async def get(self, ref: Ref) -> Machine | None:
        """The machine by id; None when the cloud says that there is no such id (fresh ids may lag).

        Raises:
            Unavailable, Throttled: nothing is known.
        """
        ...

    async def stop(self, ref: Ref, *, grace_s: int) -> None:
        """Ask the workload to end within ``grace_s``; may be repeated; a machine already gone is a success.

        Raises:
            Unavailable, Throttled: ask again.
        """
        ...

    async def terminate(self, ref: Ref) -> Terminated:
        """Stop paying for the machine. May be repeated; accepted does not mean gone.

        Raises:
            Unavailable, Throttled: ask again.
        """
        ...

    async def close(self) -> None:
        """Release connections; no call follows."""
        ...


class ProviderFactory(Protocol):
    """What an entry point of the group ``nebula.providers`` names: opens one account of a cloud."""

    async def open(self, config: ProviderConfig) -> Provider:
        """Check the options (ValueError naming the bad one) and return the provider; sends nothing paid."""
        ...
