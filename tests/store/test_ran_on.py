"""What a machine is booked at that nobody saw before it was over: what was ordered, or no price at all."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.identity import Identity
from app.inventory.rounds import Known, Place
from app.provisioning.core import Core
from app.provisioning.model import ClaimSpec
from app.settings import load
from app.store.engine import begin
from catalog.offerings import Offerings
from providers.base import (
    Accelerator,
    ClaimUid,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    Offering,
    Ref,
    ResourceId,
    Tier,
    Traits,
)

NOBODY: Any = None  # asking it would fail
UID = ClaimUid("0a1b2c3d-0000-4000-8000-000000000001")
H100 = Accelerator(type="H100", count=1)
GPU = Meter(kind=MeterKind.GPU, quantity=Decimal(1), usd=Decimal("3.99"))
LISTED_DISK = Meter(kind=MeterKind.DISK, quantity=Decimal(10), usd=Decimal("0.1"))
ITS_DISK = replace(LISTED_DISK, quantity=Decimal(50))
OFFER = Offering(
    provider="fake",
    account="default",
    region="",
    tier=Tier.ON_DEMAND,
    accelerator=H100,
    shape="large",
    meters=(GPU, LISTED_DISK),
)
OTHER = replace(OFFER, shape="larger", meters=(replace(GPU, usd=Decimal("4.99")),))
CLAIM = ClaimSpec(
    uid=UID,
    name="c",
    pod_namespace="ns",
    pod_name="p",
    pod_uid="u",
    pool="gpu",
    provider="fake",
    account="default",
    region="",
    tier=Tier.ON_DEMAND,
    accelerator=H100,
)


async def ran_on(
    engine: AsyncEngine,
    *offers: Offering,
    state: MachineState = MachineState.EXITED,
    claim: ClaimSpec = CLAIM,
) -> tuple[Meter, ...]:
    """The meters of a machine of attempt 1, which shows its disk alone."""
    offerings = Offerings()
    traits = Traits(tiers=frozenset({Tier.ON_DEMAND}), settle_after_s=1.0)
    offerings.put("fake", "default", traits=traits, offerings=offers)
    core = Core(
        accounts=NOBODY,
        inventory=NOBODY,
        offerings=offerings,
        engine=engine,
        settings=load({}, {}),
        installation="i",
        leadership=NOBODY,
    )
    ref = Ref(provider="fake", account="default", region="", resource_id=ResourceId("m-1"))
    known = Known(
        machine=Machine(ref=ref, identity=None, state=state, meters=(ITS_DISK,)),
        identity=Identity(installation="i", claim_uid=UID, attempt=1, sequence=1),
        place=Place(provider="fake", account="default", region=""),
        first_shown_at=0.0,
        shown_at=0.0,
    )
    return await core._ran_on(claim, known)


async def order(engine: AsyncEngine, shape: str | None) -> None:
    """What attempt 1 ordered, as its row has it; None: the row was made again from the claim's mark."""
    rental = CLAIM.columns()
    names = ", ".join(rental)
    values = ", ".join(f":{name}" for name in rental)
    async with begin(engine) as conn:
        await conn.execute(
            text(f"insert into rental ({names}, state, epoch) values ({values}, 'open', 1)"), rental
        )
        await conn.execute(
            text(
                "insert into provision_attempt (claim_uid, number, sequence, provider, account, region, tier,"
                " accelerator, shape, epoch, send_by) values (:uid, 1, 1, 'fake', 'default', '', 'OnDemand',"
                " 'H100:1', :shape, 1, now())"
            ),
            {"uid": UID, "shape": shape},
        )


@pytest.mark.parametrize("state", [MachineState.EXITED, MachineState.GONE])
async def test_a_machine_that_is_over_when_it_is_first_seen_is_booked_at_what_was_ordered(
    engine: AsyncEngine, state: MachineState
) -> None:
    await order(engine, "large")

    assert await ran_on(engine, OTHER, OFFER, state=state) == (GPU, ITS_DISK)


async def test_without_its_row_the_only_offer_that_fits_tells(engine: AsyncEngine) -> None:
    assert await ran_on(engine, OFFER) == (GPU, ITS_DISK)


@pytest.mark.parametrize("shape", ["gone", None], ids=["not-sold-any-more", "either-of-two"])
async def test_where_nobody_knows_what_was_ordered_it_is_unpriced_and_not_its_disk_alone(
    engine: AsyncEngine, shape: str | None
) -> None:
    await order(engine, shape)

    assert await ran_on(engine, OFFER, OTHER) == ()


async def test_what_is_up_or_has_no_accelerator_is_booked_at_what_it_shows(engine: AsyncEngine) -> None:
    plain = replace(CLAIM, accelerator=None)

    assert await ran_on(engine, OFFER, state=MachineState.RUNNING) == (ITS_DISK,)
    assert await ran_on(engine, OFFER, claim=plain) == (ITS_DISK,)
