"""What this process knows of each claim's machine: a cache of rows and rounds, never the judge of either."""

import asyncio
from dataclasses import dataclass, field

from app.inventory.rounds import AccountKey
from app.provisioning.model import ClaimSpec, LiveClaim, Refused, View
from providers.base import Accelerator, Accepted, ClaimUid, Machine, Ref, ResourceId, Tier, usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """When the pass was made, and for how long the oldest attempt had been unknown then."""

    at: float
    unknown_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A claim as the server had it; None where it had none of that UID."""

    live: LiveClaim | None


@dataclass(slots=True)
class Life:
    """One claim. Moments are monotonic seconds; ``rented_at`` is None when it was before this process.

    ``ending_epoch``: the epoch under which this process has committed ``ending``; ``looked``: the claim, read
    after that. ``parted``: the last whole pass of `release` found that the cloud has taken every terminate,
    and only lists are missing.
    ``intending``: it is called open for an intent that nobody has answered yet, so there may be no row.
    """

    claim: ClaimSpec
    state: str | None = None
    intending: bool = False
    ref: Ref | None = None
    hint: Ref | None = None  # what the claim's status names; shown to people, and never acted on as it is
    recalled: bool = False
    judged: bool = False  # its price was held against the claim's ceiling
    identity: str | None = None
    reserved: bool = True
    quoted: Accepted | None = None
    rented_at: float | None = None
    machine: Machine | None = None
    gone: bool = False
    refusal: Refused | None = None
    look_from: float | None = None
    extended_at: float = float("-inf")
    tries: int = 0
    tail_tried: bool = False
    waiting: bool = False
    ending_epoch: int | None = None
    looked: "Looked | None" = None
    untold_since: float | None = None  # since when neither row nor claim has taken a machine down
    doubt: str = ""
    parted: "Parted | None" = None
    terminated: dict[ResourceId, float] = field(default_factory=dict)
    noted: dict[ResourceId, tuple[object, ...]] = field(default_factory=dict)
    renting: asyncio.Lock = field(default_factory=asyncio.Lock)
    releasing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_main(self, ref: Ref) -> bool:
        """Whether this is the recorded machine. A list may name another region than the create's answer."""
        return self.ref is not None and self.ref.resource_id == ref.resource_id and self.is_own(ref)

    def is_own(self, ref: Ref) -> bool:
        """Whether it was shown under the claim's own provider and account."""
        return (ref.provider, ref.account) == self.claim.key

    @property
    def has_row(self) -> bool:
        """Whether the store has told of a rental that has not ended."""
        return self.state in ("live", "ending") or (self.state == "open" and not self.intending)

    @property
    def key(self) -> AccountKey:
        return self.claim.key

    def view(self) -> View:
        price = usd_per_hour(self.quoted.meters) if self.quoted else None
        if self.machine is not None and self.machine.meters:
            price = usd_per_hour(self.machine.meters)
        return View(
            state=self.state,
            ref=self.ref or self.hint,
            machine=self.machine,
            reserved=self.reserved,
            answered=self.quoted is not None,
            gone=self.gone,
            identity=self.identity,
            usd_per_hour=price,
            refusal=self.refusal,
        )


def claim_from_columns(values: dict[str, str]) -> ClaimSpec:
    """A claim rebuilt from its rental row, for release when the object is gone."""
    kind, _, count = values["accelerator"].rpartition(":")
    return ClaimSpec(
        uid=ClaimUid(values["claim_uid"]),
        name=values["claim_name"],
        pod_namespace=values["pod_namespace"],
        pod_name=values["pod_name"],
        pod_uid=values["pod_uid"],
        pool=values["pool"],
        provider=values["provider"],
        account=values["account"],
        region=values["region"],
        tier=Tier(values["tier"]),
        accelerator=Accelerator(type=kind, count=int(count)) if kind else None,
    )
