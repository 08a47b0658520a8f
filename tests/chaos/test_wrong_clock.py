"""The controller's clock is ten minutes wrong: no Pod is cut off early, and none is kept too long.

The clock that lies is a preloaded library, built here: the process, its libraries and its TLS believe it.
The database and the API server keep their own.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import liar
from tests.chaos.world import CLOUD, PATIENT, World

STUBBORN = {**CLOUD, "life": {"boot_s": 0, "stop_s": 3600}}  # nothing stops within its grace


@pytest.fixture(scope="session")
def lie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = liar.built(tmp_path_factory.mktemp("clock"))
    if library is None:
        pytest.skip("no C compiler here to build a wrong clock with")
    return library


@pytest.mark.parametrize("scenario", [STUBBORN], ids=["workloads that do not stop"])
@pytest.mark.parametrize("off_s", [600, -600], ids=["ten minutes ahead", "ten minutes behind"])
async def test_a_clock_that_is_ten_minutes_wrong_ends_no_pod_early_and_none_late(
    world: World, lie: Path, off_s: int
):
    options = PATIENT | liar.options(lie, off_s)
    controller = world.controller(options=options)
    await world.start(controller)
    assert abs(_ahead_s(controller.log) - off_s) < 10

    await world.create_pod("limited", activeDeadlineSeconds=300)
    await world.create_pod("graceful", terminationGracePeriodSeconds=2)
    await world.until_ready("limited", "graceful")
    lists = (await world.cloud.truth())["calls"]["list"]
    await world.cloud.until(
        lambda truth: truth["calls"]["list"] > lists + 5, within_s=60, what="five more lists"
    )
    assert {"limited", "graceful"} <= await world.ready()

    await world.delete_pods("graceful")
    await world.until_gone("graceful")

    assert (await world.pod("limited"))["status"]["phase"] == "Running"
    await world.until("its claim goes", lambda: _claims_are(world, 1))
    await world.one_machine_for_each_pod(ever=2)
    await world.each_attempt_was_sent_once()


@pytest.mark.parametrize(
    "scenario",
    [{**CLOUD, "clock": {"skew_s": off_s}} for off_s in (600, -600)],
    ids=["ten minutes ahead", "ten minutes behind"],
)
async def test_a_cloud_whose_clock_is_ten_minutes_wrong_doubles_nothing_and_leaves_nothing(
    world: World, scenario: dict[str, Any]
):
    controller = world.controller()
    await world.start(controller, die_at="send.after", keep=False)
    await world.create_pod("only")
    await world.died(controller)

    await world.start(controller)
    await world.until_ready("only")

    await world.one_machine_for_each_pod(ever=1)
    await world.each_attempt_was_sent_once()
    await world.delete_pods("only")
    await world.until_nothing_is_left()


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count


def _ahead_s(log: Path) -> float:
    """How far ahead the controller found its own clock."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (ahead_s,) = {line["ahead_s"] for line in lines if "ahead_s" in line}
    return float(ahead_s)
