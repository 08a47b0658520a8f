"""Which candidate a request goes to, and why not the others. Pure: no I/O, no clock, no chance.

The order is the order of trying. The purchase tier is the outermost axis, always: no provider is tried in the
second tier before every provider and region was passed over in the first. Inside a tier the pool's strategy
orders providers and their regions. Every place looked at is in the answer, as a `Candidate` or as a `Skip`
with one reason of a closed set, so that what was decided can be explained later from the answer alone.

A price is of the whole machine, disk included. One that is not known is never taken for nothing: it ranks
after every known one, and is passed over where a ceiling or a limit in dollars holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction

from app.api.keys import MAX_PRICE_ANNOTATION
from app.api.model import CapacityType
from app.api.nodepool import BudgetAction, EgressMode, NodePoolSpec, ProviderEntry, Strategy
from app.api.quantities import usd
from app.api.reasons import SkipReason
from app.placement.constraints import NodeView
from app.placement.market import LISTED, Market
from app.placement.request import PlacementRequest
from app.store.blocks import Block
from app.store.budgets import Standing
from catalog.offerings import AccountKey, AccountOffers, OfferingView, in_region
from catalog.regions import region_tokens
from catalog.sizes import Amounts, roomy, too_small
from providers.base import Accelerator, Completion, Offering, Tier

_NOT_TOLD = "its end could not be seen there"
_NO_CODE = "a Job needs the exit code, which is not told there"
_PERIODS = {"day": "a day", "week": "a week", "month": "a month", "total": "in all"}
_MONEY_STEP = Decimal(1).scaleb(-9)  # as fine as the API's money is


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a pool holds now, claims that the watch has not shown yet included.

    ``usd_per_hour`` sums the machines whose price is known; ``unpriced`` counts the others.
    """

    machines: Mapping[AccountKey, int] = field(default_factory=dict)
    gpus: int = 0
    usd_per_hour: Decimal = Decimal(0)
    unpriced: int = 0
    budgets: tuple[Standing, ...] = ()  # those that count the machine that is asked for

    def plus(
        self, key: AccountKey, *, machines: int, gpus: int, usd_per_hour: Decimal | None, unpriced: int
    ) -> "Usage":
        """This and some more machines of one account."""
        return Usage(
            machines={**self.machines, key: self.machines.get(key, 0) + machines},
            gpus=self.gpus + gpus,
            usd_per_hour=self.usd_per_hour + (usd_per_hour or 0),
            unpriced=self.unpriced + unpriced,
            budgets=self.budgets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What became of earlier placements, by (provider, account, region, tier): refusals in a row.

    It orders nothing (blocks say what is not tried); it is told with each candidate.
    """

    refusals: Mapping[tuple[str, str, str, Tier], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place that can be tried now. ``offerings``: what may be rented there, primary first.

    They are empty only for a request without accelerator at a provider that lists no such shapes.
    ``usd_per_hour`` is the primary's price for the whole machine; None when unknown, which is not free.
    ``max_usd_per_hour`` is what the machine may cost at most, None when nothing limits it. ``refusals``: how
    many orders there, whatever for, were refused since the last that was not.
    """

    provider: str
    account: str
    region: str
    tier: Tier
    accelerator: Accelerator | None
    offerings: tuple[Offering, ...] = ()
    usd_per_hour: Decimal | None = None
    max_usd_per_hour: Decimal | None = None
    refusals: int = 0

    @property
    def ceiling_usd_per_hour(self) -> Decimal | None:
        """What to count the machine with until it is rented: the ceiling, else the price."""
        return self.usd_per_hour if self.max_usd_per_hour is None else self.max_usd_per_hour

    def __str__(self) -> str:
        return _place(self.provider, self.account, self.tier, self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A place that cannot be tried now. ``region`` None: the whole provider, whatever the region.

    ``detail`` says in words what ``reason`` does not. Of a blocked place, ``until`` is when the last of its
    ``blocks`` (row ids) lapses. ``for_good``: only another pool, Pod or catalogue could mend it.
    """

    provider: str
    account: str
    region: str | None
    tier: Tier
    reason: SkipReason
    detail: str = ""
    until: datetime | None = None
    blocks: tuple[int, ...] = ()
    usd_per_hour: Decimal | None = None
    for_good: bool = False

    def __str__(self) -> str:
        return _place(self.provider, self.account, self.tier, self.region or "")


Place = Candidate | Skip
_Refusal = tuple[SkipReason, str, bool]


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
    market: Market = LISTED,
) -> list[Place]:
    """Every place that the pool allows, in the order of trying; the first `Candidate` is the choice.

    ``offerings`` holds the accounts that are open, ``nodes`` the virtual nodes that exist. Blocks that have
    lapsed at ``now`` are ignored. ``market`` says what a machine costs; it must be pure.
    """
    live = [block for block in blocks if block.expires_at > now]
    walk = _Walk(
        request=request,
        pool=pool,
        offerings=offerings,
        nodes=nodes,
        blocks=live,
        usage=usage,
        history=history,
        market=market,
    )
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
    usage: Usage
    history: History
    market: Market

    def tier(self, tier: Tier) -> list[Place]:
        places = [place for entry in self._entries() for place in self._provider(entry, tier)]
        if self.pool.strategy is Strategy.LOWEST_PRICE:
            places.sort(key=_dearness)  # stable: ties stay as listed
        return places

    def _entries(self) -> Sequence[ProviderEntry]:
        if self.pool.strategy is not Strategy.WEIGHTED:
            return self.pool.providers
        return sorted(self.pool.providers, key=self._share)

    def _share(self, entry: ProviderEntry) -> Fraction:
        """How far the provider would be above its weight with one machine more."""
        held = self.usage.machines.get((entry.name, entry.account), 0)
        return Fraction(held + 1, entry.weight or 1)

    def _provider(self, entry: ProviderEntry, tier: Tier) -> Iterator[Place]:
        key = (entry.name, entry.account)
        offers = self.offerings.get(key)
        if offers is None:
            why = self.market.closed(key)
            shown = f"its account cannot be opened: {why}" if why else "no such account is open"
            yield self._skip(key, tier, SkipReason.PROVIDER_UNREGISTERED, shown)
        elif (refusal := self._refusal(offers, tier)) is not None:
            reason, why, for_good = refusal
            yield self._skip(key, tier, reason, why, for_good=for_good)
        else:
            yield from self._regions(entry, offers, tier)

    def _refusal(self, offers: AccountOffers, tier: Tier) -> _Refusal | None:
        """Why the whole provider is out in this tier, and whether for good."""
        traits, request = offers.traits, self.request
        selector = self.pool.namespace_selector
        if selector is not None and not selector.selects(request.namespace_labels):
            why = f"the pool's namespaceSelector does not select namespace {request.namespace}"
            return SkipReason.NAMESPACE_NOT_ALLOWED, why, False
        if tier not in traits.tiers:
            return SkipReason.CAPACITY_TYPE_UNSUPPORTED, f"it sells no {tier} machines", True
        egress = self.pool.egress
        if egress is not None and egress.mode is not EgressMode.OPEN and not traits.enforces_egress:
            return SkipReason.EGRESS_POLICY_UNSUPPORTED, f"it cannot enforce egress {egress.mode}", True
        told = self.market.completion(request, offers)
        if request.restart_policy != "Always" and told is Completion.NEVER:
            return SkipReason.COMPLETION, _NOT_TOLD, True
        if request.needs_exit_code and told is not Completion.CODE:
            return SkipReason.COMPLETION, _NO_CODE, True
        deadline_s, longest_s = request.active_deadline_s, traits.max_lifetime_s
        if deadline_s is not None and longest_s is not None and deadline_s > longest_s:
            why = f"its machines live {longest_s:g} s, the Pod may need {deadline_s} s"
            return SkipReason.LIFETIME, why, True
        if misfit := self._shape_refusal(offers, tier):
            return misfit
        if misfits := self.market.refuses(request, offers.key):
            return SkipReason.REQUEST_UNSUPPORTED, misfits, True
        if unfit := request.node.against(self.nodes.get(offers.key)):
            return SkipReason.NODE_UNAVAILABLE, unfit, False
        return self._gpus_over()

    def _shape_refusal(self, offers: AccountOffers, tier: Tier) -> _Refusal | None:
        wanted = self.request.accelerator
        if wanted is None:
            if offers.traits.needs_accelerator:
                return SkipReason.REQUEST_UNSUPPORTED, "it rents no machines without accelerator", True
            return self._size_refusal(offers.find(None, tier=tier))
        rows = offers.find(wanted)
        if not rows:
            known = bool(offers.offerings)
            why = f"it offers no {wanted}" if known else "its offers are not known yet"
            return SkipReason.ACCELERATOR_UNSUPPORTED, why, known
        if all(row.tier is not tier for row in rows):
            return SkipReason.CAPACITY_TYPE_UNSUPPORTED, f"it offers no {wanted} as {tier}", True
        return self._size_refusal(tuple(row for row in rows if row.tier is tier))

    def _size_refusal(self, rows: Sequence[Offering]) -> _Refusal | None:
        """Why none of these machines has room for the Pod; a place that lists none may have any size."""
        asked = self._asked()
        if not rows or asked is None or roomy(rows, asked):
            return None
        what = f"{self.request.accelerator} machines" if self.request.accelerator else "machines"
        return SkipReason.REQUEST_UNSUPPORTED, too_small(rows, asked, what=what), True

    def _asked(self) -> Amounts | None:
        return Amounts.of(self.request.workload) if self.request.workload is not None else None

    def _gpus_over(self) -> _Refusal | None:
        limit = self.pool.limits.gpus if self.pool.limits else None
        wanted = self.request.accelerator.count if self.request.accelerator else 0
        if limit is None or self.usage.gpus + wanted <= limit or not wanted:
            return None
        if wanted > limit:
            return SkipReason.LIMIT, f"it asks for {wanted} GPUs, and limits.gpus is {limit} in all", True
        why = f"{self.usage.gpus} GPUs of limits.gpus {limit} are taken, and it asks for {wanted}"
        return SkipReason.LIMIT, why, False

    def _regions(self, entry: ProviderEntry, offers: AccountOffers, tier: Tier) -> Iterator[Place]:
        key = offers.key
        rows = offers.find(self.request.accelerator, tier=tier)
        for region in region_tokens(entry.regions, served=offers.regions, words=offers.words):
            listed = in_region(rows, region)
            if not listed and self.request.accelerator is not None:
                why = f"it offers no {self.request.accelerator} as {tier} there"
                reason = SkipReason.ACCELERATOR_UNSUPPORTED
                yield self._skip(key, tier, reason, why, region=region, for_good=True)
                continue
            if (misfit := self._size_refusal(listed)) is not None:
                reason, why, for_good = misfit
                yield self._skip(key, tier, reason, why, region=region, for_good=for_good)
                continue
            here = self.market.choose(self.request, roomy(listed, self._asked()))
            if listed and not here:
                why = "the Pod's options leave nothing of what it offers there"
                reason = SkipReason.REQUEST_UNSUPPORTED
                yield self._skip(key, tier, reason, why, region=region, for_good=True)
                continue
            price = self.market.price(self.request, here[0]) if here else None
            over = self._too_dear(tier, price) or self._dollars_over(price) or self._spent(tier, price)
            if over is not None:
                reason, why, for_good = over
                yield self._skip(key, tier, reason, why, region=region, price=price, for_good=for_good)
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
                    usd_per_hour=price,
                )
            else:
                yield Candidate(
                    provider=entry.name,
                    account=entry.account,
                    region=region,
                    tier=tier,
                    accelerator=self.request.accelerator,
                    offerings=here,
                    usd_per_hour=price,
                    max_usd_per_hour=self._frozen(tier, price),
                    refusals=self.history.refusals.get((entry.name, entry.account, region, tier), 0),
                )

    def _ceiling(self, tier: Tier) -> tuple[Decimal, str] | None:
        """What one machine may cost at most, and who says so; the smallest that applies."""
        pool, asked = self.pool, self.request.max_usd_per_hour
        kind = CapacityType(tier.value)
        ceilings = []
        if (allowed := pool.ceiling_usd_per_hour(kind)) is not None:
            spot = kind is CapacityType.SPOT and pool.spot_max_price is not None
            ceilings.append((allowed, "the pool's spotMaxPrice" if spot else "the pool's maxPrice"))
        if asked is not None:
            ceilings.append((asked, f"annotation {MAX_PRICE_ANNOTATION}"))
        return min(ceilings, key=lambda ceiling: ceiling[0], default=None)

    def _too_dear(self, tier: Tier, price: Decimal | None) -> _Refusal | None:
        ceiling = self._ceiling(tier)
        if ceiling is None or (price is not None and price <= ceiling[0]):
            return None
        amount, source = ceiling
        shown = "its price is not known" if price is None else f"{usd(price)} an hour"
        return SkipReason.PRICE, f"{shown}, at most {usd(amount)} by {source}", False

    def _dollars_over(self, price: Decimal | None) -> _Refusal | None:
        """Why the machine does not go into what is left of ``limits.usdPerHour``."""
        limit = self.pool.limits.usd_per_hour if self.pool.limits else None
        if limit is None:
            return None
        words = f"limits.usdPerHour {usd(limit)}"
        if price is None:
            return SkipReason.LIMIT, f"its price is not known, and {words} counts it", False
        if self.usage.unpriced:
            why = f"{self.usage.unpriced} machines of the pool have no known price, and {words} counts them"
            return SkipReason.LIMIT, why, False
        price = _in_steps(price)
        if price > limit:
            return SkipReason.LIMIT, f"{usd(price)} an hour, and {words} is less than one machine", False
        if self.usage.usd_per_hour + price > limit:
            why = f"{usd(self.usage.usd_per_hour)} of {words} are taken, and it costs {usd(price)} an hour"
            return SkipReason.LIMIT, why, False
        return None

    def _spent(self, tier: Tier, price: Decimal | None) -> _Refusal | None:
        """Why a budget has no room for the machine: which one, and how much of it is left.

        One without a known price counts with its ceiling; without that, too, no budget can tell.
        """
        ceiling = self._ceiling(tier)
        counted = ceiling[0] if ceiling is not None else price
        for each in self.usage.budgets:
            if each.action == BudgetAction.REFUSE_ON_DEMAND.value and tier is Tier.SPOT:
                continue
            words = f"budget {each.name} of {usd(each.amount_usd)}, {_PERIODS[each.period]}"
            left = each.left_usd()
            if left <= 0:
                return SkipReason.BUDGET, f"nothing is left of {words}: {_counted_so_far(each)}", False
            if counted is None:
                return SkipReason.BUDGET, f"its price is not known, and {words} counts it", False
            if counted * each.look_ahead_s / 3600 > left:
                cost = usd(_to_read(counted))
                why = f"{usd(_to_read(left))} is left of {words}, and it costs {cost} an hour"
                return SkipReason.BUDGET, f"{why}: {_counted_so_far(each)}", False
        return None

    def _frozen(self, tier: Tier, price: Decimal | None) -> Decimal | None:
        """What the claim will say that the machine may cost at most.

        A limit in dollars is only as good as the prices that it adds up: under one, nothing may become dearer
        than it was when it was counted.
        """
        if price is not None and self.pool.limits and self.pool.limits.usd_per_hour is not None:
            return _in_steps(price)
        ceiling = self._ceiling(tier)
        return ceiling[0] if ceiling else None

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
        key: AccountKey,
        tier: Tier,
        reason: SkipReason,
        detail: str,
        *,
        region: str | None = None,
        price: Decimal | None = None,
        for_good: bool = False,
    ) -> Skip:
        provider, account = key
        return Skip(
            provider=provider,
            account=account,
            region=region,
            tier=tier,
            reason=reason,
            detail=detail,
            usd_per_hour=price,
            for_good=for_good,
        )


def _dearness(place: Place) -> tuple[bool, Decimal]:
    price = place.usd_per_hour
    return price is None, price or Decimal(0)


def _in_steps(price: Decimal) -> Decimal:
    """The price as the API can hold it, never less and never nothing."""
    return max(price.quantize(_MONEY_STEP, rounding=ROUND_CEILING), _MONEY_STEP)


def _place(provider: str, account: str, tier: Tier, region: str) -> str:
    name = provider if account == "default" else f"{provider}/{account}"
    return " ".join(part for part in (name, tier.value, region) if part)


def _counted_so_far(each: Standing) -> str:
    return (
        f"{usd(_to_read(each.spent_usd))} is spent, {usd(_to_read(each.usd_per_hour))} an hour runs or is"
        f" promised and counts for {each.look_ahead_s} s more"
    )


def _to_read(amount: Decimal) -> Decimal:
    """An amount for a sentence: nothing is decided by it."""
    return amount.quantize(Decimal("0.0001"))
