"""What a create tells of its moment, where our clock and RunPod's differ."""

import json
import time
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from providers.base import (
    Accelerator,
    Attempt,
    ClaimUid,
    Offering,
    OutcomeUnknown,
    ProviderConfig,
    Tier,
    Workload,
)
from providers.runpod.adapter import RunPod

H100 = Accelerator(type="H100", count=1)


@pytest.mark.parametrize("offset_s", [600, -600], ids=["ours-is-behind", "ours-is-ahead"])
async def test_a_create_is_dated_by_the_clouds_clock_which_dates_its_pods(offset_s: int) -> None:
    """Else a pod of ours that somebody renamed would count as a copy, made long after its create."""
    creates: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            creates.append(await request.json())
        return web.Response(status=503, headers={"Date": formatdate(time.time() + offset_s, usegmt=True)})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    provider = await RunPod.open(
        ProviderConfig(
            name="runpod", installation="i", options={"url": url}, credentials={"RUNPOD_API_KEY": "k"}
        )
    )
    try:
        for number in (1, 2):
            with pytest.raises(OutcomeUnknown):
                await provider.provision(
                    _attempt(number),
                    Workload(image="a:1", accelerator=H100),
                    offering=OFFER,
                    access=None,
                    avoid=frozenset(),
                )
    finally:
        await provider.close()
        await runner.cleanup()

    sent = [int(body["env"]["NEBULA_SENT"]) for body in creates]
    # Each answer moves the clock for what comes after it.
    assert offset_s - 60 < sent[1] - sent[0] < offset_s + 60, json.dumps(sent)


OFFER = Offering(
    provider="runpod",
    account="default",
    region="",
    tier=Tier.ON_DEMAND,
    accelerator=H100,
    shape="NVIDIA H100 80GB HBM3",
    meters=(),
)


def _attempt(number: int) -> Attempt:
    return Attempt(
        claim_uid=ClaimUid("c"),
        number=number,
        sequence=number,
        identity=f"nb-test-{number}",
        token=f"t-{number}",
        account="default",
        region="",
        tier=Tier.ON_DEMAND,
        ceiling_usd_per_hour=None,
    )
