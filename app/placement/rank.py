"""Which candidate a request goes to, and why not the others. Pure: no I/O, no clock, no chance.

The order is the order of trying. The purchase tier is the outermost axis, always: no provider is tried in the
second tier before every provider and region was passed over in the first. Inside a tier the pool's strategy
orders providers and their regions. Every place looked at is in the answer, as a `Candidate` or as a `Skip`
with one reason of a closed set, so that what was decided can be explained later from the answer alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from app.api.nodepool import EgressMode, NodePoolSpec, ProviderEntry, Strategy
from app.api.reasons import SkipReason
from app.placement.constraints import NodeView
from app.placement.request import PlacementRequest
from app.store.blocks import Block
from catalog.offerings import AccountKey, AccountOffers, OfferingView, in_region
from catalog.regions import region_tokens, words_of
from providers.base import Accelerator, Completion, Offering, Tier

_NOT_TOLD = "its end could not be seen there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a pool holds now, claims that the watch has not shown yet included.

    ``usd_per_hour`` sums the machines whose price is known; ``unpriced`` counts the others.
    """

    machines: Mapping[AccountKey, int] = field(default_factory=dict)
    gpus: int = 0
    usd_per_hour: Decimal = Decimal(0)
    unpriced: int = 0

    def plus(
        self, key: AccountKey, *, machines: int, gpus: int, usd_per_hour: Decimal | None, unpriced: int
    ) -> "Usage":
        """This and some more machines of one account."""
        return Usage(
            machines={**self.machines, key: self.machines.get(key, 0) + machines},
            gpus=self.gpus + gpus,
            usd_per_hour=self.usd_per_hour + (usd_per_hour or 0),
            unpriced=self.unpriced + unpriced,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What became of earlier placements, by (provider, account, region, tier): refusals in a row."""

    refusals: Mapping[tuple[str, str, str, Tier], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place that can be tried now. ``offerings``: what may be rented there, primary first.

    They are empty only for a request without accelerator at a provider that lists no such shapes.
    ``usd_per_hour`` is the primary's price for the whole machine; None when unknown, which is not free.
    """

    provider: str
    account: str
    region: str
    tier: Tier
    accelerator: Accelerator | None
    offerings: tuple[Offering, ...] = ()

    @property
    def usd_per_hour(self) -> Decimal | None:
        return self.offerings[0].usd_per_hour if self.offerings else None

    def __str__(self) -> str:
        return _place(self.provider, self.account, self.tier, self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A place that cannot be tried now. ``region`` None: the whole provider, whatever the region.

    ``detail`` says in words what ``reason`` does not. Of a blocked place, ``until`` is when the last of its
    ``blocks`` (row ids) lapses.
    """

    provider: str
    account: str
    region: str | None
    tier: Tier
    reason: SkipReason
    detail: str = ""
    until: datetime | None = None
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return _place(self.provider, self.account, self.tier, self.region or "")


Place = Candidate | Skip


def rank(
    request: PlacementRequest,
    *,
    pool: NodePoolSpec,
    offerings: OfferingView,
    nodes: Mapping[AccountKey, NodeView],
    blocks: Sequence[Block],
    usage: Usage,
    history: History,
    now: datetime,
) -> list[Place]:
    """Every place that the pool allows, in the order of trying; the first `Candidate` is the choice.

    ``offerings`` holds the accounts that are open, ``nodes`` the virtual nodes that exist. Blocks that have
    lapsed at ``now`` are ignored.

    Raises:
        ValueError: the pool's strategy is not built; admission refuses such a pool.
    """
    if pool.strategy is not Strategy.ORDERED:
        raise ValueError(f"strategy {pool.strategy} is not supported by this version")
    del usage, history  # strategies and limits that look at them come with their issue
    live = [block for block in blocks if block.expires_at > now]
    walk = _Walk(request=request, pool=pool, offerings=offerings, nodes=nodes, blocks=live)
    return [place for tier in pool.capacity_types for place in walk.tier(Tier(tier.value))]


def chosen(places: Iterable[Place]) -> Candidate | None:
    """The first candidate, if there is any."""
    return next((place for place in places if isinstance(place, Candidate)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    request: PlacementRequest
    pool: NodePoolSpec
    offerings: OfferingView
    nodes: Mapping[AccountKey, NodeView]
    blocks: Sequence[Block]

    def tier(self, tier: Tier) -> Iterator[Place]:
        for entry in self.pool.providers:
            key = (entry.name, entry.account)
            offers = self.offerings.get(key)
            if offers is None:
                yield self._skip(key, tier, SkipReason.PROVIDER_UNREGISTERED, "no such account is open")
            elif refusal := self._refusal(offers, tier):
                yield self._skip(key, tier, *refusal)
            else:
                yield from self._regions(entry, offers, tier)

    def _refusal(self, offers: AccountOffers, tier: Tier) -> tuple[SkipReason, str] | None:
        """Why the whole provider is out in this tier."""
        traits, request = offers.traits, self.request
        if tier not in traits.tiers:
            return SkipReason.CAPACITY_TYPE_UNSUPPORTED, f"it sells no {tier} machines"
        egress = self.pool.egress
        if egress is not None and egress.mode is not EgressMode.OPEN and not traits.enforces_egress:
            return SkipReason.EGRESS_POLICY_UNSUPPORTED, f"it cannot enforce egress {egress.mode}"
        if request.restart_policy != "Always" and traits.completion is Completion.NEVER:
            return SkipReason.COMPLETION, _NOT_TOLD
        deadline_s, longest_s = request.active_deadline_s, traits.max_lifetime_s
        if deadline_s is not None and longest_s is not None and deadline_s > longest_s:
            return SkipReason.LIFETIME, f"its machines live {longest_s:g} s, the Pod may need {deadline_s} s"
        if misfit := self._shape_refusal(offers, tier):
            return misfit
        if unfit := request.node.against(self.nodes.get(offers.key)):
            return SkipReason.NODE_UNAVAILABLE, unfit
        return None

    def _shape_refusal(self, offers: AccountOffers, tier: Tier) -> tuple[SkipReason, str] | None:
        wanted = self.request.accelerator
        if wanted is None:
            if offers.traits.needs_accelerator:
                return SkipReason.REQUEST_UNSUPPORTED, "it rents no machines without accelerator"
            return None
        rows = offers.find(wanted)
        if not rows:
            why = f"it offers no {wanted}" if offers.offerings else "its offers are not known yet"
            return SkipReason.ACCELERATOR_UNSUPPORTED, why
        if all(row.tier is not tier for row in rows):
            return SkipReason.CAPACITY_TYPE_UNSUPPORTED, f"it offers no {wanted} as {tier}"
        return None

    def _regions(self, entry: ProviderEntry, offers: AccountOffers, tier: Tier) -> Iterator[Place]:
        key = offers.key
        rows = offers.find(self.request.accelerator, tier=tier)
        for region in region_tokens(entry.regions, served=offers.regions, words=words_of(entry.name)):
            here = in_region(rows, region)
            if not here and self.request.accelerator is not None:
                why = f"it offers no {self.request.accelerator} as {tier} there"
                yield self._skip(key, tier, SkipReason.ACCELERATOR_UNSUPPORTED, why, region=region)
            elif hits := self._covering(entry, tier, region):
                last = max(hits, key=lambda block: (block.expires_at, block.id))
                yield Skip(
                    provider=entry.name,
                    account=entry.account,
                    region=region,
                    tier=tier,
                    reason=SkipReason.BLOCKED,
                    detail=last.cause.kind,
                    until=last.expires_at,
                    blocks=tuple(sorted(block.id for block in hits)),
                )
            else:
                yield Candidate(
                    provider=entry.name,
                    account=entry.account,
                    region=region,
                    tier=tier,
                    accelerator=self.request.accelerator,
                    offerings=here,
                )

    def _covering(self, entry: ProviderEntry, tier: Tier, region: str) -> list[Block]:
        """The blocks on one place. One refused host of many is no block here: the provider avoids it."""
        accelerator = self.request.accelerator
        return [
            block
            for block in self.blocks
            if block.scope.covers(
                provider=entry.name,
                account=entry.account,
                accelerator=accelerator.key if accelerator else "",
                tier=tier,
                region=region,
                template=self.request.template,
            )
        ]

    @staticmethod
    def _skip(
        key: AccountKey, tier: Tier, reason: SkipReason, detail: str, *, region: str | None = None
    ) -> Skip:
        provider, account = key
        return Skip(
            provider=provider, account=account, region=region, tier=tier, reason=reason, detail=detail
        )


def _place(provider: str, account: str, tier: Tier, region: str) -> str:
    name = provider if account == "default" else f"{provider}/{account}"
    return " ".join(part for part in (name, tier.value, region) if part)
