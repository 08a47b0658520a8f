"""What passes between provisioning and its callers: the claim, its mark, leadership, and outcomes.

An outcome says what the caller may do next; none of them is an exception, since every one is expected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from providers.base import DEFAULT_ACCOUNT, Accelerator, ClaimUid, Machine, Meter, Ref, RejectionKind, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSpec:
    """One candidate, as frozen on the claim. ``instance`` is the machine that its own status names."""

    uid: ClaimUid
    name: str
    pod_namespace: str
    pod_name: str
    pod_uid: str
    pool: str
    provider: str
    account: str
    region: str
    tier: Tier
    accelerator: Accelerator | None
    max_price: Decimal | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    instance: Ref | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.provider, self.account)

    @property
    def place(self) -> str:
        """``aws us-east-1 Spot``, for people."""
        name = self.provider if self.account == DEFAULT_ACCOUNT else f"{self.provider}/{self.account}"
        return " ".join(part for part in (name, self.region, self.tier.value) if part)

    def columns(self) -> dict[str, str]:
        """The rental row's own columns."""
        return {
            "claim_uid": self.uid,
            "claim_name": self.name,
            "pod_namespace": self.pod_namespace,
            "pod_name": self.pod_name,
            "pod_uid": self.pod_uid,
            "pool": self.pool,
            "provider": self.provider,
            "account": self.account,
            "region": self.region,
            "tier": self.tier.value,
            "accelerator": str(self.accelerator) if self.accelerator else "",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the claim itself remembers of its newest attempt: it may have been sent until ``send_by``.

    ``account_id`` is the cloud's own id of the account that it was for: another account's lists and gets say
    nothing of it, however little the rows remember. None on marks of an earlier version.
    """

    sequence: int
    send_by: datetime
    account_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecorded:
    """A machine that the store could not take down while it was away, as the claim itself remembers it.

    For the books alone: nothing is ended by its word. ``shown``: a list or get has shown it; else only its
    order was answered. ``asked_at``: when its end was about to be asked for, the last time before the cloud
    took that, by the clock of whoever asked, which nobody compared with the database's; None: it was not.
    """

    ref: Ref
    identity: str
    meters: tuple[Meter, ...]
    created_at: datetime | None
    account_id: str | None
    shown: bool
    asked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClaim:
    """A claim as a live read showed it. ``version`` makes the next mark a compare-and-set.

    ``blank``: it has no status at all yet. ``memory``: of machines that the store could not take down, as
    `app.provisioning.memory` wrote it or somebody has edited it; "": none.
    """

    mark: Mark | None
    deleting: bool
    version: str
    blank: bool = False
    memory: str = ""


class ClaimUnreadable(Exception):
    """The claim could not be read or written now: neither there nor gone."""


class MarkRefused(Exception):
    """The claim changed since it was read, or is another one now: nothing was written."""


class ClaimPort(Protocol):
    """The way to the claim object, supplied by the caller. Reads are live, never from a cache."""

    async def look(self, claim: ClaimSpec) -> LiveClaim | None:
        """The claim of that name and UID; None when the server says that there is no such claim.

        Raises:
            ClaimUnreadable: the server did not answer.
        """
        ...

    async def mark(self, claim: ClaimSpec, mark: Mark, *, live: LiveClaim) -> None:
        """Write the mark, and with it phase Provisioning, if the claim is still as ``live`` showed it.

        Raises:
            MarkRefused: it is not, or the claim is gone.
            ClaimUnreadable: unknown whether it was written.
        """
        ...

    async def remember(self, claim: ClaimSpec, memory: str, *, live: LiveClaim) -> None:
        """Give the claim this memory in place of its own, if it is still as ``live`` showed it.

        Raises:
            MarkRefused: it is not, or the claim is gone.
            ClaimUnreadable: unknown whether it was written.
        """
        ...

    async def find(self, uid: ClaimUid) -> bool:
        """Whether any claim has that UID, by a live list.

        Raises:
            ClaimUnreadable: the server did not answer.
        """
        ...


class Leadership(Protocol):
    """The right to rent. ``epoch`` is None until it is written to both the Lease and the store."""

    @property
    def epoch(self) -> int | None: ...

    def valid(self) -> bool:
        """Whether nobody else can be leader at this moment, by a monotonic clock."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the pool says about renting, read once for each call. ``template`` names the owner's template."""

    block_ttl_s: float
    template: str | None = None


class Why(StrEnum):
    """Why nothing was decided yet."""

    UNKNOWN = "unknown"  # an attempt may have taken effect and is being looked for
    THROTTLED = "throttled"
    NO_STORE = "no_store"
    NO_CLUSTER = "no_cluster"
    NO_ACCOUNT = "no_account"  # the provider account is not configured, or not open yet
    WRONG_ACCOUNT = "wrong_account"  # the credential is for another account than the machine's
    NOT_LEADER = "not_leader"
    RETRY = "retry"  # nothing was sent; ask again
    NO_WORKLOAD = "no_workload"  # nothing is left to settle, and the caller could not say what to run
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """One machine is recorded for the claim."""

    ref: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The cloud refused; the claim is of no further use."""

    kind: RejectionKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ask again in ``after_s``. ``for_s``: how long the oldest unsettled attempt has been unknown, else 0."""

    why: Why
    message: str
    after_s: float
    for_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The claim is in release, or was: nothing is rented for it again."""


Outcome = Rented | Refused | Waiting | Over


@dataclass(frozen=True, slots=True, kw_only=True)
class Releasing:
    """Not proven gone yet: call again in ``after_s``.

    ``accepted``: every machine that is known has an accepted terminate, so its Pod may go. ``unknown_s``: how
    long the oldest attempt has been sent, or may have been, without anybody knowing what came of it, else 0;
    one that was accepted and whose machine nobody has seen yet, not even its terminate, counts as well.
    """

    accepted: bool
    why: Why
    message: str
    after_s: float
    unknown_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """No machine of this claim exists, and none can appear by our doing: the finalizer may go."""


Release = Releasing | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known of a claim's machine at this moment, without asking anybody.

    ``state`` None: no row is known. ``machine``: as last shown, None if never. ``gone``: proven gone.
    ``answered``: this process itself heard the cloud take the order, so ``reserved`` holds even before any
    list shows the machine; of a machine from before our start it is only known once one does.
    ``refusal``: what the cloud, or we before asking, answered to the last attempt; None: it was not refused.
    """

    state: str | None = None
    ref: Ref | None = None
    machine: Machine | None = None
    reserved: bool = True
    answered: bool = False
    gone: bool = False
    identity: str | None = None
    usd_per_hour: Decimal | None = None
    refusal: Refused | None = None
