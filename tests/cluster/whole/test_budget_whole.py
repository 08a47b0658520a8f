"""A budget on a real cluster: it tells, ends what runs in its scope, and says why nothing more is rented."""

import asyncio
import json

import pytest

from app.api import keys
from tests.cluster.whole.owners_world import Obj, Owners, is_gated

pytestmark = pytest.mark.slow
POOL = "spent"


async def test_a_spent_budget_tells_drains_and_refuses_with_its_name_and_what_is_left(owners: Owners) -> None:
    pool = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": POOL},
        "spec": {"providers": [{"name": "again"}]},
    }
    await owners.kubectl("apply", "-f", "-", stdin=pool)
    try:
        await owners.deployment("train", POOL)
        (first,) = await owners.ready()

        budget = {"amount": "0.00001", "period": "day", "action": "Drain", "thresholds": [50, 100]}
        patch = json.dumps({"spec": {"budget": budget}})
        await owners.kubectl("patch", "nodepool", POOL, "--type=merge", "-p", patch)

        await owners.until_none_alive()
        (told,) = {each["reason"] for each in await _events(owners) if "100%" in each["message"]}
        assert told == "BudgetThreshold"
        gated = await owners.until(
            lambda pods: [
                pod for pod in pods if pod["metadata"]["uid"] != first["metadata"]["uid"] and _told(pod)
            ],
            what="the refusal",
        )
        words = " ".join(_told(gated[0]))
        assert f"nothing is left of budget nodepool/{POOL} of $0.00001" in words, words
        assert len(await owners.machines()) == 1
    finally:
        await owners.kubectl("delete", "deployment", "train", "--ignore-not-found", "--wait=false")
        await owners.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
        await owners.kubectl("delete", "nodepool", POOL, "--wait=false")


async def _events(owners: Owners) -> list[Obj]:
    """Of the pool, once there are two: half of it, and all of it."""
    async with asyncio.timeout(30):
        while True:
            text = await asyncio.to_thread(owners.kubectl_, "get", "events", "-A", "-o", "json")
            found = [each for each in json.loads(text)["items"] if each["involvedObject"]["name"] == POOL]
            if any("100%" in each["message"] for each in found):
                return found
            await asyncio.sleep(0.2)


def _told(pod: Obj) -> list[str]:
    """What a gated Pod says of a budget."""
    said = [each.get("message", "") for each in pod["status"].get("conditions", [])]
    return [each for each in said if "budget nodepool/" in each] if is_gated(pod) else []
