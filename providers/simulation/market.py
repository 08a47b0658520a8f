"""What a simulated cloud offers, at which price, how much of it there is, and how much is taken.

A pool is one accelerator (or none) in one tier and region. Capacity is counted in GPUs, machines where there
is no accelerator; a pool without a limit is never full.
"""

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from providers.base import Tier
from providers.simulation.orders import Order, Refusal, Refused
from providers.simulation.scenario import Offer, Scenario
from providers.simulation.state import Machine

Pool = tuple[str, str, str]  # region, tier, accelerator in lower case ("" for none)
Meters = list[tuple[str, str, str | None]]


class Market:
    """Prices and capacity. ``changed`` holds what differs from the scenario, for the journal."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._offers: dict[tuple[str, str], Offer] = {}
        self._prices: dict[Pool, Decimal | None] = {}
        self._capacity: dict[Pool, int] = {}
        self._used: Counter[Pool] = Counter()
        self._gpus = 0
        self.changed: dict[str, dict[str, Any]] = {"capacity": {}, "prices": {}}
        for offer in scenario.offers:
            for region in scenario.regions_of(offer):
                name = (offer.accelerator or "").lower()
                self._offers[(region, name)] = offer
                for tier, usd in offer.usd_per_hour.items():
                    self._prices[(region, tier.value, name)] = usd
                    if tier in offer.capacity:
                        self._capacity[(region, tier.value, name)] = offer.capacity[tier]

    def restore(self, changed: dict[str, dict[str, Any]]) -> None:
        """What was changed before a restart; pools that the scenario does not have any more are dropped."""
        for name, units in changed["capacity"].items():
            if (pool := _pool_named(name)) in self._prices:
                self.set_capacity(pool, units)
        for name, usd in changed["prices"].items():
            if (pool := _pool_named(name)) in self._prices:
                self.set_price(pool, None if usd is None else Decimal(usd))

    def offer_of(self, order: Order) -> Offer:
        """What an order would rent.

        Raises:
            Refused: there is no such thing, or the order is wrong.
        """
        if order.region not in (self._scenario.regions or ("",)):
            raise Refused(Refusal.UNKNOWN_REGION, f"there is no region {order.region!r}")
        offer = self._offers.get((order.region, (order.accelerator or "").lower()))
        what = order.accelerator or "a machine without accelerator"
        if offer is None or order.tier not in offer.usd_per_hour:
            raise Refused(Refusal.UNSUPPORTED, f"{what} is not offered as {order.tier}{within(order.region)}")
        if order.accelerator and order.count not in offer.counts:
            raise Refused(Refusal.UNSUPPORTED, f"{what} is not offered with {order.count} GPUs")
        if not order.image:
            raise Refused(Refusal.INVALID, "image must not be empty")
        if order.name is not None and not 1 <= len(order.name) <= 63:
            raise Refused(Refusal.INVALID, "name must have 1 to 63 characters")
        return offer

    def check_ceiling(self, order: Order, meters: Meters) -> None:
        """Raises:
        Refused: the scenario looks at ceilings, and this price is above it.
        """
        ceiling = order.ceiling_usd_per_hour
        if not self._scenario.check_ceiling or ceiling is None:
            return
        told = (Decimal(quantity) * Decimal(usd) for _, quantity, usd in meters if usd is not None)
        if (price := sum(told, Decimal(0))) > ceiling:
            raise Refused(Refusal.PRICE, f"{price} dollars an hour is above the ceiling of {ceiling}")

    def check_quota(self, order: Order) -> None:
        """Raises:
        Refused: the account would have more GPUs than it may.
        """
        quota = self._scenario.quota_gpus
        if quota is not None and order.accelerator and self._gpus + order.count > quota:
            raise Refused(Refusal.QUOTA, f"the quota is {quota} GPUs for this account")

    def meters(self, order: Order) -> Meters:
        """What an order costs by the hour now; nothing for what is not offered."""
        pool = pool_of_order(order)
        offer = self._offers.get((pool[0], pool[2]))
        if offer is None:
            return []
        return self._meters(pool, offer, count=order.count, disk_gib=order.disk_gib)

    def room(self, pool: Pool, count: int) -> bool:
        limit = self._capacity.get(pool)
        return limit is None or self._used[pool] + count <= limit

    def hold(self, machine: Machine, sign: int) -> None:
        """Take (1) or give back (-1) what a machine of our account uses."""
        if machine.account == self._scenario.account:
            self._used[pool_of(machine)] += sign * machine.count
            self._gpus += sign * machine.count if machine.accelerator else 0

    def pool(self, *, region: str, tier: Tier, accelerator: str | None) -> Pool:
        """Raises:
        Refused: the cloud does not offer that.
        """
        pool = (region, tier.value, (accelerator or "").lower())
        if pool not in self._prices:
            what = accelerator or "a machine without accelerator"
            raise Refused(Refusal.UNSUPPORTED, f"{what} is not offered as {tier}{within(region)}")
        return pool

    def set_capacity(self, pool: Pool, units: int | None) -> None:
        if units is None:
            self._capacity.pop(pool, None)
        else:
            self._capacity[pool] = units
        self.changed["capacity"]["/".join(pool)] = units

    def set_price(self, pool: Pool, usd_per_hour: Decimal | None) -> bool:
        """False when it was that already."""
        old, self._prices[pool] = self._prices[pool], usd_per_hour
        self.changed["prices"]["/".join(pool)] = text(usd_per_hour)
        return old != usd_per_hour

    def offers(self) -> Iterator[tuple[str, Tier, Offer, int, Meters]]:
        """Everything that can be rented: region, tier, kind, count and its meters now."""
        for (region, name), offer in self._offers.items():
            for tier in offer.usd_per_hour:
                for count in offer.counts:
                    pool = (region, tier.value, name)
                    yield region, tier, offer, count, self._meters(pool, offer, count=count)

    def capacity(self) -> Iterator[tuple[Pool, int | None, int]]:
        """For each pool: how much there is (None: no limit) and how much is used."""
        for pool in self._prices:
            yield pool, self._capacity.get(pool), self._used[pool]

    def _meters(self, pool: Pool, offer: Offer, *, count: int, disk_gib: int | None = None) -> Meters:
        usd = text(self._prices.get(pool))
        meters: Meters = [("gpu", str(count), usd) if offer.accelerator else ("machine", "1", usd)]
        if offer.machine_usd_per_hour:
            meters.append(("machine", "1", str(offer.machine_usd_per_hour)))
        if self._scenario.disk_usd_per_gib_hour is not None:
            gib = max(self._scenario.disk_min_gib, disk_gib or 0)
            meters.append(("disk", str(gib), str(self._scenario.disk_usd_per_gib_hour)))
        return meters


def pool_of(machine: Machine) -> Pool:
    return (machine.region, machine.tier, (machine.accelerator or "").lower())


def pool_of_order(order: Order) -> Pool:
    return (order.region, order.tier.value, (order.accelerator or "").lower())


def text(usd: Decimal | None) -> str | None:
    return None if usd is None else str(usd)


def within(region: str) -> str:
    return f" in {region}" if region else ""


def _pool_named(name: str) -> Pool:
    region, tier, accelerator = name.split("/")
    return (region, tier, accelerator)
