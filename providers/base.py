"""The provider contract: what an adapter offers, and the values that pass between it and the controller.

Adapters translate; they hold no policy. What is always true of the values here:

* a price is a list of meters in exact dollars (`Decimal`), never one float;
* every time is an aware UTC `datetime`, every duration ends in ``_s``;
* a `Ref` always carries provider, account and region, so that no call guesses where a machine lives;
* "could not ask" is an exception, "asked, and it is not there" a value; nobody may turn one into the other.

What a cloud may offer beyond this is in `providers.capabilities`. ``docs/add-a-provider.md`` has the rules,
their reasons, and which API call of which cloud serves what.
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
_SECRET_CHARS = 4  # shorter ones are not masked


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

    ``usd`` is None when the cloud names no believable price: unpriced, never zero. ``label`` tells apart two
    meters of one kind (bytes in and out, a disk and a public address); it is "" for the only one. A monthly
    price is turned into one by the hour by the adapter, with the cloud's own length of a month.
    """

    kind: MeterKind
    quantity: Decimal
    usd: Decimal | None
    label: str = ""


def usd_per_hour(meters: Sequence[Meter]) -> Decimal | None:
    """Dollars an hour for the whole machine; None when any hourly meter is unpriced or there is no meter.

    A price or quantity below zero, or one that is no number, is none.
    """
    total = Decimal(0)
    hourly = [meter for meter in meters if meter.kind is not MeterKind.BYTES]
    for meter in hourly:
        if meter.usd is None or not all(one.is_finite() and one >= 0 for one in (meter.usd, meter.quantity)):
            return None
        total += meter.quantity * meter.usd
    return total if hourly else None


class BillsFrom(StrEnum):
    """When a meter starts. Where a cloud's words allow both, the earlier: an upper bound, corrected later."""

    ACCEPTED = "accepted"  # the order was taken
    STARTED = "started"  # `Machine.started_at`


class BillsUntil(StrEnum):
    """When a meter stops."""

    ENDED = "ended"  # the workload or the machine stopped, by itself or not
    TERMINATE_ASKED = "terminate_asked"  # the first terminate was accepted
    GONE = "gone"  # the resource is no more; it counts while exited, too


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingRule:
    """How a cloud turns a run into billed seconds, for one kind of meter (None: for all without a rule).

    A run is rounded up to whole ``step_s`` (0: exact) and is billed for ``minimum_s`` at least, at its last
    price. ``reclaim_free_s``: a spot machine that the cloud takes back within so long of its start costs
    nothing. ``stopped_times``: how many times its price the meter costs once the workload is over.
    """

    kind: MeterKind | None
    starts: BillsFrom
    until: BillsUntil
    step_s: int = 1
    minimum_s: int = 0
    reclaim_free_s: int = 0
    stopped_times: Decimal = Decimal(1)


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


class EgressMode(StrEnum):
    """What a workload may reach. Inbound traffic is never restricted."""

    OPEN = "Open"
    BLOCKED = "Blocked"
    ALLOWLIST = "Allowlist"


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """The pool's policy, frozen at placement. A cloud that cannot enforce all of it refuses in `validate`."""

    mode: EgressMode = EgressMode.OPEN
    cidrs: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """Who pulls the image. ``server`` is the host of the image reference."""

    server: str
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a cloud needs to run one Pod's container, resolved and free of Kubernetes.

    ``dead_man``: the machine should end by itself once nobody has extended its life for
    `ProviderConfig.dead_man_s` (`Traits.dead_man`).

    ``env`` carries secrets, and so may ``command`` and ``args``, which refer to it: they are left out of
    ``repr``, and their values are never logged. ``secret_env`` names the variables that hold a Secret's
    content: a cloud that shows an environment to more people than may read the Secret delivers those another
    way, or refuses in `Provider.validate`. ``ports`` are TCP. ``options`` are the claim's frozen provider
    options, the same as in `Attempt`. ``needs_commands``: a probe or hook runs commands beside it, so that
    only a cloud with `providers.capabilities.Executes` will do.

    ``stdin``: its input stays open for whoever attaches, and with ``stdin_once`` ends with the first of them;
    ``terminal``: it has a terminal, which merges its outputs. Both come only to clouds with
    `providers.capabilities.Attaches`. Without ``stdin`` it reads an end of file at once.
    """

    image: str
    command: tuple[str, ...] = field(default=(), repr=False)
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_env: tuple[str, ...] = ()
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
    registry: RegistryLogin | None = None
    egress: Egress = Egress()
    needs_commands: bool = False
    stdin: bool = False
    stdin_once: bool = False
    terminal: bool = False
    dead_man: bool = False

    def masked(self, text: str) -> str:
        """``text`` without our secrets, for whatever a cloud says of a request: it may quote from it.

        Values of fewer than four characters stay: they are no secrets, and would be found everywhere.
        """
        values = [self.env[name] for name in self.secret_env if name in self.env]
        if self.registry is not None:
            values.append(self.registry.password)
        parts = {part for value in values for part in (value, *value.splitlines())}
        for part in sorted(parts, key=len, reverse=True):
            if len(part) >= _SECRET_CHARS:
                text = text.replace(part, "[hidden]")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """One thing that can be rented: a shape, in a region, in a tier, at a price list.

    ``region`` is "" where the provider has no regions. ``shape`` is the provider's own id. ``available`` is a
    hint for ranking: False when the cloud says that it has none now, None when it does not say. ``cpu``,
    ``memory_bytes`` and ``disk_bytes`` are what the whole shape has, None where the request decides.
    ``priced_at`` is since when the price is known to be so, None: since it was told. ``stock`` is the cloud's
    own word for how much there is, for people. Neither makes two offerings different.
    """

    provider: str
    account: str
    region: str
    tier: Tier
    accelerator: Accelerator | None
    shape: str
    meters: tuple[Meter, ...]
    available: bool | None = None
    cpu: Decimal | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    architecture: str = "amd64"
    priced_at: datetime | None = field(default=None, compare=False)
    stock: str = field(default="", compare=False)

    @property
    def usd_per_hour(self) -> Decimal | None:
        return usd_per_hour(self.meters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One intent to rent, already committed as a row and marked on the claim.

    ``identity`` becomes the machine's name and tag; ``token`` is the client token of idempotent creates, at
    most 64 ASCII characters. Both are the same on every replay of this attempt, and different for every other
    attempt ever made. ``ceiling_usd_per_hour`` is for the whole machine, disk included. ``pins`` is what
    `providers.capabilities.Prepares` answered, recorded with the intent: a replay sends the same bytes.
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
    pins: Mapping[str, str] = field(default_factory=dict)


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
    """Where one machine lives. ``region`` is the provider's own region, "" where it has none.

    The same machine has the same ref whichever call shows it. So a cloud that tells the place late, or only
    sometimes, has "" here and the place in `Machine.location`.
    """

    provider: str
    account: str
    region: str
    resource_id: ResourceId


class MachineState(StrEnum):
    """What the cloud says of a machine, from ordered to over.

    ``QUEUED``: accepted, no capacity committed. ``BOOTING``: capacity committed, not reachable yet.
    ``RUNNING``: reachable, not merely started. ``EXITED``: the workload is over, but the resource is still
    there and may still cost money; a machine on its way out, too. ``GONE``: the cloud keeps it only as
    history; nothing exists or bills. An unknown word of a cloud is ``BOOTING``, named in `Machine.trouble`.
    A silent host changes no state: it is `Machine.trouble`, until the cloud says that the machine is over.
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
    """How it ended. ``exit_code`` is None when the cloud does not tell: never read that as 0.

    ``image``: its image could not be pulled, so that nothing ever ran.
    """

    reason: EndReason
    exit_code: int | None = None
    message: str = ""
    at: datetime | None = None
    image: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortAddress:
    """Where a container port is reached from outside: ``host:port``, or a URL where the cloud proxies."""

    port: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine as a list or a get shows it. ``identity`` is the raw name or tag, parsed elsewhere.

    Where a cloud has several carriers of it, the one that people edit least: tag or environment before name.
    ``maybe`` is an identity that one carrier tells and another denies, where it cannot be seen whether that
    is our machine under another name or somebody's copy of it: it is never ended for that, and while it is
    shown the attempt of that identity is not absent.
    ``created_at``, ``started_at`` and ``end.at`` are the provider's clock. ``meters`` are those running now,
    so an exited machine shows what it still costs. ``ports`` is empty where every port is itself at
    ``endpoint``. ``location`` is the finest place that the cloud names (zone, data centre, country).
    ``trouble`` is what the cloud finds wrong with a machine that is not over, None when nothing.
    ``expires_at`` is when the cloud ends it by itself, unless it is extended; None: never, as far as is told.
    """

    ref: Ref
    identity: str | None
    state: MachineState
    maybe: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    end: End | None = None
    endpoint: str | None = None
    meters: tuple[Meter, ...] = ()
    host: str | None = None
    ports: tuple[PortAddress, ...] = ()
    location: str | None = None
    trouble: str | None = None
    expires_at: datetime | None = None

    @property
    def exists(self) -> bool:
        """False once nothing is left that could run or bill."""
        return self.state is not MachineState.GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One answer to `Provider.list` for one list region.

    ``account_id`` is what the cloud calls the account that answered (or a marker of ours that only our
    account can show). ``unknown`` is None only when every page arrived and nothing failed; otherwise it says
    why absence proves nothing, and the machines are those that were seen all the same. ``calls`` is how many
    requests it took, which the poll clock pays for. ``clock_offset_s`` is as in `Accepted`.
    """

    region: str
    account_id: str | None
    machines: tuple[Machine, ...]
    unknown: str | None = None
    calls: int = 1
    clock_offset_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The cloud took the order. ``reserved`` is False when it queued it without committing capacity.

    ``clock_offset_s`` is the provider's clock minus ours, from the response's Date header. ``unfit`` is why
    the machine is not what was asked for (dearer, another region or card, a failed bid that left a disk): it
    is recorded like any other, released at once, and then counts as that refusal.
    """

    ref: Ref
    account_id: str | None = None
    reserved: bool = True
    meters: tuple[Meter, ...] = ()
    created_at: datetime | None = None
    clock_offset_s: float | None = None
    host: str | None = None
    location: str | None = None
    unfit: "Rejection | None" = None


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
    """The cloud provably did not rent, and nothing of the attempt is left there.

    ``scope`` is the narrowest that is true; None blocks no offering. A scope that names only a host leaves
    the offering open: the next attempt may be made at once, with that host among those to avoid.
    """

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


class NotOffered(ProviderError):
    """This machine has no such way in, and will not get one. The message says what to ask for instead."""


class CredentialRejected(Unavailable):
    """The cloud does not accept our credential (now). Nothing follows for any machine."""


# --- the contract --------------------------------------------------------------------------------


class Completion(StrEnum):
    """What an adapter can tell of a workload's end, so that a Job is never placed where it cannot be seen.

    For a cloud that rents bare VMs: what our runner on the VM makes visible.
    """

    CODE = "code"  # that it ended, and its exit code
    ENDED = "ended"  # that it ended
    NEVER = "never"  # nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option that a pool or a Pod's annotation may set for this cloud.

    Admission refuses an unknown name and a value that ``pattern`` does not match from end to end; what needs
    more than that is `Provider.validate`'s to say.
    """

    name: str
    meaning: str
    pattern: str = r".*"
    default: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an adapter declares instead of coding. Durations in seconds, rates in calls a second.

    ``settle_after_s``: how long after a create's last possible moment of effect the machine may stay out of
    a complete list. ``replay_for_s``: for how long after the first send the same token is idempotent, also
    when the machine that it made has ended meanwhile (None: never send twice). ``list_every_s``: how often a
    list may begin at most; ``provision_every_s``: the same for creates. ``provision_deadline_s``: the longest
    that `Provider.provision` may take from call to answer, so the client's time-out of the settling rule.
    ``boot_deadline_s``: from accepted to running. ``ended_listed_s``: how long a machine that ended by itself
    stays in the list; None when until it is terminated. ``graceful_stop``: `Provider.stop` reaches the
    workload; False means that it does nothing, and that no grace need be waited for. ``dead_man``: a create
    may carry a limit after which the cloud itself ends the machine, and `providers.capabilities.Extends` puts
    it off.
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
    provision_every_s: float = 0.0
    ended_listed_s: float | None = None
    graceful_stop: bool = False
    dead_man: bool = False
    billing: tuple[BillingRule, ...] = ()
    options: tuple[OptionSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """How one configured provider is opened. ``options`` come from ``NEBULA_PROVIDERS``; credentials do not.

    ``credentials`` are the entries of the account's Secret, by the names that its cloud uses for environment
    variables; an adapter falls back on the variable of that name. Empty where there is no such Secret.
    ``settle_after_s`` and ``call_timeout_s`` override the adapter's declaration when set (tests, the demo);
    ``call_timeout_s`` then bounds a create, too. ``dead_man_s`` is how long a machine lives that nobody
    extends any more, None for ever.
    """

    name: str
    account: str = DEFAULT_ACCOUNT
    installation: str
    options: Mapping[str, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    settle_after_s: float | None = None
    call_timeout_s: float | None = None
    dead_man_s: float | None = None


@runtime_checkable
class Provider(Protocol):
    """One account of one cloud.

    Every method may be called at any time and from many tasks at once. Retries inside an SDK are off, or
    carry the attempt's token. Credentials are read once, at open: a changed credential is a new open, so that
    a list and the get that confirms it were answered for one account.
    """

    @property
    def name(self) -> str:
        """The configured name, equal to ``providers[].name`` in a NodePool."""
        ...

    @property
    def traits(self) -> Traits: ...

    async def account(self) -> str:
        """The cloud's own id of the account behind our credential. It is asked before any list.

        Where the cloud names none: its id for a part of ours that only this account can show (a registered
        key, a template, an App). Making that part again gives another id, and so reads as another account.

        Raises:
            CredentialRejected, Unavailable: it cannot be told now.
        """
        ...

    def validate(self, workload: Workload) -> str | None:
        """Why this cloud can never run the workload, naming the field and the fix; None if it can. Pure.

        Egress, options and sizes (environment, arguments, user data) included: what is not refused here and
        cannot be honoured is a `Rejection` of kind invalid, never left out in silence.
        """
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

        One request that can cost money, and no waiting before it: the fence was checked just before this
        call, and whatever is slow belongs into ``prepare``. A create that would be dearer than the ceiling is
        not sent (`Rejection`, price). A refusal after which something is left at the cloud is not a
        `Rejection` but `Accepted` with ``unfit``. ``avoid`` is ignored where the cloud names no hosts.

        With an idempotent create, the same attempt answers with the machine that it made before, dead or
        alive; an adapter compares its identity and tier, since a cloud may answer a replay with a shrug.

        Raises:
            OutcomeUnknown: the order may have been taken: whatever broke after the request left, any 5xx,
                an answer without an id, and our own deadline. Cancelling the call means the same.
            Throttled: it provably was not; `Unavailable` is not raised here.
        """
        ...

    async def list(self, regions: frozenset[str]) -> Sequence[Round]:
        """Every machine of the account, ours or not, one `Round` for each list region.

        ``regions`` are those with pools, live claims or rentals; an adapter whose list is global answers one
        round with region "". A page, region or field that failed makes that round unknown, not shorter; so
        does an identity that must be read apart and could not be. Every state is listed, ended machines for
        as long as the cloud keeps them (`Traits.ended_listed_s`). What the create itself would have marked
        otherwise may be left out where the cloud filters by that mark (a tag's key, an App).

        Raises:
            Unavailable, Throttled: nothing is known of any region.
        """
        ...

    async def get(self, ref: Ref) -> Machine | None:
        """The machine by id; None when the cloud says that there is no such id (fresh ids may lag).

        None only from the cloud's own "no such machine", never from a 404 of another kind (a proxy, a
        credential that answers 404).

        Raises:
            Unavailable, Throttled: nothing is known.
        """
        ...

    async def stop(self, ref: Ref, *, grace_s: int) -> None:
        """Ask the workload to end within ``grace_s``; may be repeated; a machine already gone is a success.

        It never parks the machine: a call that frees the GPU and goes on billing a disk, or may start again
        later, is not used. Where nothing else exists it does nothing (`Traits.graceful_stop`).

        Raises:
            Unavailable, Throttled: ask again.
        """
        ...

    async def terminate(self, ref: Ref) -> Terminated:
        """Stop paying for the machine. May be repeated; accepted does not mean gone.

        One id a request: clouds fail a whole batch for one bad id. Data that the claim did not create stays.

        Raises:
            Unavailable, Throttled: ask again; "not now" and "locked" of the cloud are `Unavailable` as well.
        """
        ...

    async def close(self) -> None:
        """Release connections; no call follows."""
        ...


class ProviderFactory(Protocol):
    """What an entry point of the group ``nebula.providers`` names: opens one account of a cloud."""

    async def open(self, config: ProviderConfig) -> Provider:
        """Check the options (ValueError naming the bad one) and return the provider; sends nothing paid.

        A credential that is missing is `CredentialRejected`: a Secret may bring it at any time.
        """
        ...
