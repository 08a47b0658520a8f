"""What a claim in Reserve is worth now: is its machine in hand, and does its pool still allow it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, auto

from app.api.model import CapacityType
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.api.quantities import usd
from app.api.reasons import SkipReason
from app.placement.rank import Candidate, Place, Skip
from app.provisioning.model import View
from providers.base import MachineState, Tier

# Skips that hold against a machine that is rented already; what else a ranking would avoid is no reason to
# give it back.
_FORBIDDEN = frozenset(
    {SkipReason.EGRESS_POLICY_UNSUPPORTED, SkipReason.NAMESPACE_NOT_ALLOWED, SkipReason.PRICE}
)


class Standing(Enum):
    """``UNSEEN``: recorded by an earlier process, and whether its capacity is committed is not known yet."""

    IN_HAND = auto()
    QUEUED = auto()
    UNSEEN = auto()
    LOST = auto()


def standing_of(view: View) -> Standing:
    """How a rented machine stands.

    A machine whose workload has begun is in hand, whatever became of it: that is for the Pod to tell, and not
    a reason to run the work again elsewhere.
    """
    machine = view.machine
    if view.state in ("ending", "ended"):
        return Standing.LOST
    if machine is not None and machine.started_at is not None:
        return Standing.IN_HAND
    if machine is not None and machine.state in (MachineState.RUNNING, MachineState.EXITED):
        return Standing.IN_HAND
    if view.gone:
        return Standing.LOST
    if machine is None:
        if not view.reserved:
            return Standing.QUEUED
        return Standing.IN_HAND if view.answered else Standing.UNSEEN
    if machine.state is MachineState.QUEUED:
        return Standing.QUEUED
    return Standing.IN_HAND if machine.state is MachineState.BOOTING else Standing.UNSEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why the gate must not be lifted for a claim. ``lasting``: waiting will not help, so it is given up."""

    text: str
    lasting: bool


def objection_to(
    claim: NodeClaim, *, pool: NodePool, places: Sequence[Place], usd_per_hour: Decimal | None, rented: bool
) -> Objection | None:
    """What the pool, as it is now, has against the claim. ``places``: the pool's ranking for the Pod.

    ``usd_per_hour`` is the price of the machine that is ``rented``, None if unknown. A claim whose own
    ceiling is as low as the pool's was held to it when it was rented.
    """
    spec, name = claim.spec, pool.metadata.name
    tier = Tier((spec.capacity_type or CapacityType.ON_DEMAND).value)
    region = spec.region or ""
    at = [
        place
        for place in places
        if (place.provider, place.account, place.tier) == (spec.provider, spec.account, tier)
        and (place.region is None or place.region == region)
    ]
    where = " ".join(part for part in (spec.provider, region, tier.value) if part)
    if not at:
        return Objection(text=f"NodePool {name} does not allow {where} any more", lasting=True)
    if spec.egress != pool.spec.egress:
        return Objection(text=f"the egress policy of NodePool {name} has changed", lasting=True)
    ceiling = pool.spot_ceiling_usd_per_hour if tier is Tier.SPOT else pool.spec.max_price
    most = usd_per_hour if rented and not _held_to(spec.max_price, ceiling) else spec.max_price
    if ceiling is not None and (most is None or most > ceiling):
        return Objection(
            text=f"NodePool {name} pays at most {usd(ceiling)} an hour for {where} now", lasting=True
        )
    if any(isinstance(place, Candidate) for place in at):
        return None
    skip = next(place for place in at if isinstance(place, Skip))
    if skip.reason is SkipReason.NODE_UNAVAILABLE:
        return Objection(text=skip.detail, lasting=False)
    if skip.reason in _FORBIDDEN and not (skip.reason is SkipReason.PRICE and rented):
        return Objection(text=f"NodePool {name} does not allow {where} any more: {skip.detail}", lasting=True)
    return None


def _held_to(own: Decimal | None, ceiling: Decimal | None) -> bool:
    return own is not None and ceiling is not None and own <= ceiling
