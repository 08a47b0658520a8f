"""What placement is told by real adapters: the price of the whole machine, disk included."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from app.inventory.accounts import Account, Accounts
from app.inventory.identity import new_installation
from app.placement.market import Adapters
from app.placement.request import PlacementRequest, request_of
from app.settings import load, parse_providers
from catalog.offerings import AccountOffers
from providers.base import Accelerator, Completion, Tier
from tests.providers.rows import RUNPOD
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


async def test_a_pods_options_decide_how_it_is_sold_and_what_its_end_tells(tmp_path: Path) -> None:
    scenario = RUNPOD | {
        "offers": [{"accelerator": "H100", "counts": [8], "usd_per_hour": {"SECURE": "4", "COMMUNITY": "3"}}]
    }

    def asking(**options: str) -> PlacementRequest:
        pod = a_pod(None)
        pod["metadata"]["annotations"] = {
            f"cloud.aibrix.ai/runpod-{key}": each for key, each in options.items()
        }
        return request_of(pod)

    async with FakeCloud.running(tmp_path, scenario=scenario, simulator="runpod") as cloud:
        configured = parse_providers(f"runpod,url={cloud.url}")
        settings = load({"profile": "fast"}, {}).model_copy(update={"providers": configured})
        accounts = Accounts(settings, new_installation(), credentials=_a_key)
        opened: asyncio.Queue[Account] = asyncio.Queue()
        accounts.on_open(opened.put_nowait)
        running = asyncio.create_task(accounts.run())
        try:
            account = await asyncio.wait_for(opened.get(), timeout=20)
            rows = [row for row in await account.provider.offers() if str(row.accelerator) == "H100:8"]
            offers = AccountOffers(provider="runpod", account="default", traits=account.traits)
            market = Adapters(accounts)

            (secure,) = market.choose(asking(), rows)
            (community,) = market.choose(asking(cloud="COMMUNITY"), rows)

            prices = [market.price(asking(), each) or 0 for each in (secure, community)]
            assert [price - 20 * Decimal("0.1") / 730 for price in prices] == [32, 24]
            assert market.completion(asking(), offers) is Completion.NEVER
            assert market.completion(asking(job="report"), offers) is Completion.CODE
            assert market.refuses(asking(job="report"), account.key) is not None  # it has no command
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _a_key(_entry: object) -> dict[str, str]:
    return {"RUNPOD_API_KEY": "any"}
