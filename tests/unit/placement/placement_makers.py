"""Makers for the pure core: a test names only what its rule is about."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from app.api.nodepool import NodePoolSpec
from app.placement.constraints import NodeConstraints, NodeView
from app.placement.market import LISTED
from app.placement.rank import History, Usage, rank
from app.placement.request import PlacementRequest
from app.store.blocks import Block, Cause, Scope
from catalog.offerings import AccountKey, AccountOffers
from providers.base import Accelerator, Meter, MeterKind, Offering, PodUid, Tier, Traits

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)
H100X8 = Accelerator(type="h100", count=8)
BOTH = frozenset(Tier)


def a_block(provider: str, *, id: int = 1, kind: str = "capacity", expires_at=LATER, **axes: Any) -> Block:
    """A row of table ``block``; without any axis the whole account is blocked."""
    return Block(
        id=id,
        scope=Scope(**({"provider": provider, "account": "default", "everything": not axes} | axes)),
        cause=Cause(kind=kind, message="", pool="", pod_namespace="", pod_name="", claim_uid=""),
        created_at=NOW,
        expires_at=expires_at,
    )


def offers(
    provider: str,
    *regions: str,
    accelerator: Accelerator | None = H100X8,
    tiers=BOTH,
    usd: str | None = None,
    prices: dict[str, str | None] | None = None,
    **traits: Any,
) -> AccountOffers:
    """An account that offers one shape in each region (none given: without regions) and tier.

    ``usd`` is what a machine costs an hour (None: not known), ``prices`` the same for single regions.
    """
    rows = [
        Offering(
            provider=provider,
            account="default",
            region=region,
            tier=tier,
            accelerator=accelerator,
            shape=f"shape-{tier}",
            meters=meters((prices or {}).get(region, usd)),
        )
        for region in regions or ("",)
        for tier in sorted(tiers)
    ]
    return AccountOffers(
        provider=provider,
        account="default",
        traits=Traits(tiers=frozenset(tiers), **traits),
        offerings=tuple(rows),
    )


def meters(usd: str | None) -> tuple[Meter, ...]:
    return (Meter(kind=MeterKind.MACHINE, quantity=Decimal(1), usd=None if usd is None else Decimal(usd)),)


def view(*accounts: AccountOffers) -> dict[AccountKey, AccountOffers]:
    return {account.key: account for account in accounts}


def a_node(provider: str, **changes: Any) -> NodeView:
    labels = {"nebula.inftyai.com/provider": provider}
    return NodeView(**({"name": f"nebula-{provider}", "ready": True, "labels": labels} | changes))


def nodes(*providers: str) -> dict[AccountKey, NodeView]:
    return {(provider, "default"): a_node(provider) for provider in providers}


def a_request(**changes: Any) -> PlacementRequest:
    fields = {
        "namespace": "team",
        "name": "pod",
        "uid": PodUid("pod-uid"),
        "accelerator": H100X8,
        "node": NodeConstraints(),
        "template": "rs-uid/1",
    }
    return PlacementRequest(**(fields | changes))


def a_pool(*providers: str | dict[str, Any], **changes: Any) -> NodePoolSpec:
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in providers]
    return NodePoolSpec.model_validate(
        {"providers": entries, "capacityTypes": ["Spot", "OnDemand"]} | changes
    )


def ranked(
    request=None, *, pool, offerings, nodes, blocks=(), now=NOW, usage=None, history=None, market=LISTED
):
    return rank(
        request or a_request(),
        pool=pool,
        offerings=offerings,
        nodes=nodes,
        blocks=blocks,
        usage=usage or Usage(),
        history=history or History(),
        now=now,
        market=market,
    )


def shown(places) -> list[str]:
    """One short line a place: ``Spot aws us-east-1`` or ``Spot modal - blocked``."""
    return [
        " ".join(
            (
                place.tier.value,
                place.provider,
                "-" if place.region is None else place.region,
                getattr(place, "reason", ""),
            )
        ).strip()
        for place in places
    ]
