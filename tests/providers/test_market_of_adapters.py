"""What placement is told by real adapters: the price of the whole machine, disk included."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from app.inventory.accounts import Account, Accounts
from app.inventory.identity import new_installation
from app.placement.market import Adapters
from app.placement.request import request_of
from app.settings import load, parse_providers
from providers.base import Accelerator, Tier
from tests.support.clouds import FakeCloud

SCENARIO: dict[str, Any] = {
    "cloud": "fake",
    "disk_usd_per_gib_hour": "0.01",
    "offers": [
        {
            "accelerator": "H100",
            "counts": [8],
            "usd_per_hour": {"Spot": "2.00"},
        }
    ],
}


def a_pod(disk: str | None) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "8"} | ({"ephemeral-storage": disk} if disk else {})
    container = {"name": "main", "image": "app:1", "resources": {"limits": limits}}
    labels = {"nebula.inftyai.com/accelerator-type": "h100"}
    return {
        "metadata": {"namespace": "n", "name": "p", "uid": "u", "labels": labels},
        "spec": {"containers": [container]},
    }


@pytest.mark.behaviour(66)
async def test_the_disk_that_a_pod_asks_for_is_part_of_its_price(tmp_path: Path) -> None:
    async with FakeCloud.running(tmp_path, scenario=SCENARIO) as cloud:
        configured = parse_providers(f"acme=fake,url={cloud.url}")
        settings = load({"profile": "fast"}, {}).model_copy(update={"providers": configured})
        accounts = Accounts(settings, new_installation())
        opened: asyncio.Queue[Account] = asyncio.Queue()
        accounts.on_open(opened.put_nowait)
        running = asyncio.create_task(accounts.run())
        try:
            account = await asyncio.wait_for(opened.get(), timeout=20)
            (offering,) = await account.provider.offers()
            market = Adapters(accounts)

            small, large = (market.price(request_of(a_pod(disk)), offering) for disk in (None, "500Gi"))

            assert offering.accelerator == Accelerator(type="H100", count=8)
            assert offering.tier is Tier.SPOT
            assert small == offering.usd_per_hour == Decimal("16.10")
            assert large == Decimal("21.00")
            assert market.refuses(request_of(a_pod(None)), account.key) is None
            assert market.refuses(request_of(a_pod(None)), ("acme", "not-open")) is None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
