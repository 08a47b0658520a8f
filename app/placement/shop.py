"""Everything that could be rented now, for people: prices, stock, blocks, and why each is out. Pure.

A pool's rules are applied by the ranking that placement itself uses, for a Pod that asks for nothing but the
accelerator, with every virtual node taken for ready: so a verdict here is what such a Pod would meet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from app.api.nodepool import NodePoolSpec
from app.placement.constraints import NodeView
from app.placement.explain import WORDS
from app.placement.rank import Candidate, History, Place, Skip, Usage, rank
from app.placement.request import PlacementRequest
from app.store.blocks import Block
from catalog.offerings import AccountKey, AccountOffers, OfferingView, in_region
from catalog.rows import ANY_COUNT
from providers.base import (
    Accelerator,
    Completion,
    MeterKind,
    Offering,
    PodUid,
    Provider,
    Tier,
    Workload,
    usd_per_hour,
)
from providers.capabilities import Chooses

_IMAGE = "any"  # an image is needed to ask for a price, and changes none


@dataclass(frozen=True, slots=True, kw_only=True)
class Ware:
    """One thing that could be rented. Dollars are an hour's, disk included; None when not known.

    ``out`` is why the pool does not allow it, or not now; "" when it does, or no pool was asked.
    ``blocked_until`` is the end of the last block that covers it.
    """

    offering: Offering
    accelerator: Accelerator | None
    usd_per_hour: Decimal | None
    usd_per_gpu_hour: Decimal | None
    priced_at: datetime | None
    blocked_until: datetime | None = None
    blocked_for: str = ""
    out: str = ""


class Shop:
    """The providers' pure parts, as `app.placement.market.Market` for one request."""

    def __init__(self, providers: Mapping[AccountKey, Provider]) -> None:
        self._providers = providers

    def price(self, request: PlacementRequest, offering: Offering) -> Decimal | None:
        return self.price_of(request.workload or _workload(request.accelerator), offering)

    def refuses(self, request: PlacementRequest, account: AccountKey) -> str | None:
        provider = self._providers.get(account)
        return provider.validate(request.workload) if provider and request.workload else None

    def choose(self, request: PlacementRequest, offerings: Sequence[Offering]) -> tuple[Offering, ...]:
        if not offerings or request.workload is None:
            return tuple(offerings)
        provider: object = self._providers.get((offerings[0].provider, offerings[0].account))
        if not isinstance(provider, Chooses):
            return tuple(offerings)
        return tuple(provider.choose(request.workload, offerings))

    def completion(self, request: PlacementRequest, offers: AccountOffers) -> Completion:
        return offers.traits.completion

    def closed(self, account: AccountKey) -> str:
        return ""

    def price_of(self, workload: Workload, offering: Offering) -> Decimal | None:
        """Dollars an hour for the whole machine, by the provider where it is open, else as listed."""
        provider = self._providers.get((offering.provider, offering.account))
        if provider is None:
            return offering.usd_per_hour
        return usd_per_hour(provider.quote(workload, offering))


def wares(
    view: OfferingView,
    *,
    shop: Shop,
    accelerator: str | None,
    count: int,
    blocks: Sequence[Block] = (),
    now: datetime,
) -> list[Ware]:
    """Every offering of the accelerator (None: of each) in that count, cheapest first, unpriced ones last."""
    found = []
    for offers in view.values():
        for offering, kind in _offered(offers, accelerator, count):
            price = shop.price_of(_workload(kind), offering)
            hits = [block for block in blocks if block.expires_at > now and _covers(block, offering, kind)]
            last = max(hits, key=lambda block: (block.expires_at, block.id), default=None)
            found.append(
                Ware(
                    offering=offering,
                    accelerator=kind,
                    usd_per_hour=price,
                    usd_per_gpu_hour=_per_gpu(offering, kind, price),
                    priced_at=offering.priced_at,
                    blocked_until=last.expires_at if last else None,
                    blocked_for=last.cause.kind if last else "",
                )
            )
    return sorted(found, key=lambda ware: (ware.usd_per_hour is None, ware.usd_per_hour or Decimal(0)))


def judged(
    found: Iterable[Ware],
    *,
    pool: NodePoolSpec,
    view: OfferingView,
    shop: Shop,
    blocks: Sequence[Block],
    now: datetime,
) -> list[Ware]:
    """The same wares, each with why the pool does not allow it."""
    places: dict[Accelerator | None, list[Place]] = {}
    verdicts = []
    for ware in found:
        if ware.accelerator not in places:
            places[ware.accelerator] = rank(
                _request(ware.accelerator),
                pool=pool,
                offerings=view,
                nodes={key: NodeView(name="", ready=True) for key in view},
                blocks=blocks,
                usage=Usage(),
                history=History(),
                now=now,
                market=shop,
            )
        verdicts.append(replace(ware, out=_verdict(ware, places[ware.accelerator], pool=pool)))
    return verdicts


def _offered(
    offers: AccountOffers, accelerator: str | None, count: int
) -> Iterable[tuple[Offering, Accelerator | None]]:
    if accelerator is not None:
        asked = Accelerator(type=accelerator, count=count)
        return [(row, row.accelerator) for row in offers.find(asked)]
    kinds = {row.accelerator.type: None for row in offers.offerings if row.accelerator is not None}
    return [
        (row, row.accelerator)
        for kind in kinds
        for row in offers.find(Accelerator(type=kind, count=count))
        if row.accelerator is not None and row.accelerator.count != ANY_COUNT
    ]


def _covers(block: Block, offering: Offering, kind: Accelerator | None) -> bool:
    return block.scope.covers(
        provider=offering.provider,
        account=offering.account,
        accelerator=kind.key if kind else "",
        tier=offering.tier.value,
        region=offering.region,
    )


def _per_gpu(offering: Offering, kind: Accelerator | None, price: Decimal | None) -> Decimal | None:
    """What is asked for each GPU, where it is sold so; else its part of the whole."""
    if kind is None:
        return None
    for meter in offering.meters:
        if meter.kind is MeterKind.GPU:
            return meter.usd
    return None if price is None else price / kind.count


def _verdict(ware: Ware, places: Sequence[Place], *, pool: NodePoolSpec) -> str:
    offering = ware.offering
    if not any(
        (entry.name, entry.account) == (offering.provider, offering.account) for entry in pool.providers
    ):
        return "its provider is not in the pool"
    if offering.tier not in [Tier(tier.value) for tier in pool.capacity_types]:
        return f"the pool buys no {offering.tier} machines"
    there = [
        place
        for place in places
        if (place.provider, place.account, place.tier) == (offering.provider, offering.account, offering.tier)
    ]
    for place in there:
        if isinstance(place, Candidate):
            if offering in place.offerings:
                return ""
        elif _is_of(place, offering):
            return f"{WORDS[place.reason]}: {place.detail}" if place.detail else WORDS[place.reason]
    if any(isinstance(place, Candidate) and in_region(place.offerings, offering.region) for place in there):
        return "only where an option asks for it"
    return "its region is not in the pool"


def _is_of(skip: Skip, offering: Offering) -> bool:
    return skip.region is None or not offering.region or skip.region == offering.region


def _request(accelerator: Accelerator | None) -> PlacementRequest:
    return PlacementRequest(
        namespace="",
        name="",
        uid=PodUid(""),
        accelerator=accelerator,
        workload=_workload(accelerator),
    )


def _workload(accelerator: Accelerator | None) -> Workload:
    return Workload(image=_IMAGE, accelerator=accelerator)
