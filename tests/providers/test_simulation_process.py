"""A simulator as a process: what it keeps through SIGKILL, how it ends, and why it would not start."""

import asyncio
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import aiohttp
import pytest

from tests.support.clouds import ROOT, SMALL, FakeCloud

ORDER = {"tier": "OnDemand", "accelerator": "H100", "count": 1, "image": "x", "region": "r1"}


async def test_nothing_that_was_answered_is_lost_by_sigkill(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        answered: set[str] = set()
        enough = asyncio.Event()

        async def order(number: int) -> None:
            try:
                made = await cloud.control("POST", "/v1/machines", ORDER | {"name": f"m-{number}"})
            except (aiohttp.ClientError, TimeoutError):
                return
            answered.add(made["name"])
            if len(answered) >= 20:
                enough.set()

        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(order(number))
            await enough.wait()
            await cloud.kill()
        await cloud.start()
        truth = await cloud.truth()

    there = {machine["name"] for machine in truth["machines"]}
    assert len(answered) >= 20
    assert answered <= there <= set(truth["creates"])


async def test_capacity_faults_and_counts_survive_sigkill(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        await cloud.set_capacity(0, tier="Spot", accelerator="H100", region="r1")
        fault = await cloud.add_fault("status", verb="offers", times=3)
        await cloud.control("POST", "/v1/machines", ORDER | {"name": "m"})
        before = await cloud.truth()

        await cloud.kill()
        await cloud.start()

        after = await cloud.truth()
    assert [entry["id"] for entry in after["faults"]] == [fault]
    for key in ("creates", "create_calls", "capacity", "faults"):
        assert after[key] == before[key]
    assert after["machines"][0]["history"] == before["machines"][0]["history"]


async def test_five_hundred_orders_at_once_are_five_hundred_machines(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        await asyncio.gather(
            *(cloud.control("POST", "/v1/machines", ORDER | {"name": f"m-{n}"}) for n in range(500))
        )
        listed = await cloud.control("GET", "/v1/machines?region=r1")

    assert listed["total"] == len({machine["name"] for machine in listed["items"]}) == 500


async def test_sigterm_ends_it_cleanly_also_while_calls_are_held(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        await cloud.pause(verb="list")
        held = asyncio.create_task(cloud.control("GET", "/v1/machines?region=r1"))
        await cloud.until(lambda truth: truth["calls"].get("list") == 1)

        assert await cloud.stop() == 0
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            await held


async def test_begun_anew_it_remembers_nothing(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        await cloud.control("POST", "/v1/machines", ORDER | {"name": "m"})

        await cloud.reset(SMALL | {"account": "acct-2"})
        truth = await cloud.truth()
        await cloud.kill()
        await cloud.start()

        assert (truth["account_id"], truth["machines"], truth["creates"]) == ("acct-2", [], {})
        assert (await cloud.truth())["account_id"] == "acct-2"


async def test_a_wrong_hand_is_told_what_is_wrong(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        for path, body, said in (
            ("/sim/faults", {"kind": "earthquake"}, "earthquake"),
            ("/sim/faults", {"kind": "lost", "vreb": "list"}, "vreb"),
            ("/sim/capacity", {"tier": "Spot", "accelerator": "B300", "units": 1, "region": "r1"}, "B300"),
            ("/sim/life", {"boot": 1}, "boot"),
        ):
            with pytest.raises(AssertionError, match=said):
                await cloud.control("POST", path, body)


def test_a_scenario_that_cannot_be_used_ends_it_with_the_reason(tmp_path: Path):
    scenario = tmp_path / "bad.yaml"
    scenario.write_text("offers: []\n")
    argv = [
        sys.executable,
        "-m",
        "providers.fake.simulator",
        "--scenario",
        scenario,
        "--state",
        tmp_path / "s",
    ]

    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    assert "bad.yaml: offers" in done.stderr
    assert "Traceback" not in done.stderr


async def test_every_second_of_every_machine_is_on_the_bill(tmp_path: Path):
    """The total is the sum of the machines', each of them its billed seconds at its price."""
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        for number in range(3):
            made = await cloud.control("POST", "/v1/machines", ORDER | {"name": f"m-{number}"})
            await cloud.control("DELETE", f"/v1/machines/{made['id']}?region=r1")
        truth = await cloud.truth()

    bills = [Decimal(machine["bill_usd"]) for machine in truth["machines"]]
    assert bills == [Decimal(machine["billed_s"]) * 4 / 3600 for machine in truth["machines"]]
    assert Decimal(truth["bill_usd"]) == sum(bills) > 0
