"""The commands that ask clouds, against simulated ones: offers and the price list; the matrix."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner

from app.cli import main
from hack import matrix
from providers.simulation import scenario
from providers.simulation.scenario import ScenarioError
from tests.providers.rows import RUNPOD
from tests.support.clouds import ROOT, SMALL, FakeCloud

KEY = "rpa_canary_5f2d"
HERE = RUNPOD | {"credential": KEY}


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCloud, FakeCloud]]:
    folder = tmp_path_factory.mktemp("clouds")
    async with (
        FakeCloud.running(folder / "runpod", scenario=HERE, simulator="runpod") as runpod,
        FakeCloud.running(folder / "other", scenario=SMALL) as other,
    ):
        yield runpod, other


@pytest.fixture
async def clouds(running: tuple[FakeCloud, FakeCloud]) -> tuple[FakeCloud, FakeCloud]:
    """A RunPod and a fake cloud, begun anew."""
    runpod, other = running
    await runpod.reset(HERE)
    await other.reset(SMALL)
    return runpod, other


async def nebula(*args: str, env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    gone = {key: None for key in os.environ if key.startswith(("NEBULA_", "RUNPOD_"))}
    given = gone | {"KUBECONFIG": "/nowhere", "RUNPOD_API_KEY": KEY} | env
    # In a thread: the command has an event loop of its own.
    done = await asyncio.to_thread(CliRunner().invoke, main, list(args), env=given)
    assert KEY not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def of(clouds: tuple[FakeCloud, FakeCloud]) -> dict[str, str]:
    runpod, other = clouds
    return {"NEBULA_PROVIDERS": f"runpod,url={runpod.url} other=fake,url={other.url}"}


async def test_offers_of_all_clouds_come_cheapest_first_with_price_stock_and_age(clouds: Any):
    code, out, err = await nebula("offers", "--accelerator", "h100", "--count", "8", env=of(clouds))

    assert (code, err) == (0, "")
    lines = [line.split("   ") for line in out.splitlines()]
    assert [line[0] for line in lines] == ["PROVIDER", "other", "other", "other", "other", "runpod"]
    titles, last = (" ".join(lines[0]).split(), " ".join(lines[-1]).split())
    assert titles[-3:] == ["STOCK", "PRICE-AGE", "BLOCKED"]
    assert "NVIDIA H100 80GB HBM3" in out.splitlines()[-1]
    assert last[-4:-1] == ["4.0000", "high", "0s"]


async def test_offers_as_json_have_exact_money(clouds: Any):
    code, out, _ = await nebula("offers", "--accelerator", "A40", "-o", "json", env=of(clouds))

    assert code == 0
    cheap, dear = orjson.loads(out)
    assert (cheap["shape"], cheap["usdPerGpuHour"]) == ("community/NVIDIA A40", "0.33")
    assert (dear["shape"], dear["usdPerGpuHour"], dear["available"]) == ("NVIDIA A40", "0.44", True)
    assert dear["usdPerHour"].startswith("0.4427")


async def test_a_pools_rules_say_why_each_offer_is_out(clouds: Any, tmp_path: Path):
    pool = {
        "apiVersion": "nebula.inftyai.com/v1alpha1",
        "kind": "NodePool",
        "metadata": {"name": "gpu"},
        "spec": {
            "capacityTypes": ["OnDemand"],
            "maxPrice": "32.001",
            "providers": [{"name": "runpod"}, {"name": "other", "regions": ["r1"]}],
        },
    }
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump_all([pool, {"kind": "Deployment"}]))

    code, out, err = await nebula(
        "offers", "--accelerator", "H100", "--count", "8", "--pool", str(file), "-o", "json", env=of(clouds)
    )

    assert (code, err) == (0, "")
    verdicts = {(row["provider"], row["region"], row["tier"]): row["out"] for row in orjson.loads(out)}
    assert verdicts == {
        ("other", "r1", "Spot"): "the pool buys no Spot machines",
        ("other", "r2", "Spot"): "the pool buys no Spot machines",
        ("other", "r1", "OnDemand"): None,
        ("other", "r2", "OnDemand"): "its region is not in the pool",
        ("runpod", "", "OnDemand"): verdicts[("runpod", "", "OnDemand")],
    }
    assert (verdicts[("runpod", "", "OnDemand")] or "").startswith("too dear: $32.0027")


async def test_a_cloud_that_does_not_answer_is_said_and_its_price_list_shown(clouds: Any):
    runpod, _ = clouds
    await runpod.stop()

    code, out, err = await nebula("offers", "--accelerator", "H100", "--count", "8", env=of(clouds))

    assert code == 0
    assert "warning: runpod/default did not answer" in err
    assert "26.32" in out  # the price of the file, disk included


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["offers"], {}, "no clouds: give --providers"),
        (["offers", "--providers", "runpodd"], {}, "did you mean runpod?"),
        (
            ["offers", "--pool", "nowhere"],
            {"NEBULA_PROVIDERS": "runpod,url=http://127.0.0.1:1"},
            "--pool nowhere",
        ),
        (["offers"], {"NEBULA_PROVIDERS": "runpod,url=nonsense"}, "option url must begin with https://"),
        (["catalog", "refresh", "runpod"], {}, "--catalog-dir: where to write"),
        (["catalog", "refresh", "runpodd", "--dry-run"], {}, "did you mean runpod?"),
    ],
)
async def test_a_wrong_question_gets_one_answer(args: list[str], env: dict[str, str], said: str):
    code, _, err = await nebula(*args, env=env)

    assert code == 2
    assert said in err
    assert "Traceback" not in err


async def test_a_refreshed_price_list_shows_what_changed_and_can_be_read_again(clouds: Any, tmp_path: Path):
    folder = tmp_path / "prices"
    args = ("catalog", "refresh", "runpod", "--catalog-dir", str(folder))

    dry, shown, _ = await nebula(*args, "--dry-run", env=of(clouds))
    wrote, _, err = await nebula(*args, env=of(clouds))
    again, unchanged, _ = await nebula(*args, env=of(clouds))

    assert (dry, wrote, again) == (0, 0, 0)
    assert "-H100,H100-SXM H100-80GB,NVIDIA H100 80GB HBM3,1-8,OnDemand,,3.29" in shown
    assert "+H100,H100-SXM H100-80GB,NVIDIA H100 80GB HBM3,1-8,OnDemand,,4.00" in shown
    assert "written" in err
    assert "nothing changed" in unchanged
    text = (folder / "runpod.csv").read_text()
    assert text.startswith("# RunPod: dollars an hour")
    assert "MI300X" in text  # what the cloud did not speak of is kept


async def test_a_price_that_leapt_is_not_written_unless_it_is_said_to_be_right(clouds: Any, tmp_path: Path):
    runpod, _ = clouds
    await runpod.set_price("44", tier="OnDemand", accelerator="A40")
    args = ("catalog", "refresh", "runpod", "--catalog-dir", str(tmp_path / "prices"))

    refused, _, err = await nebula(*args, env=of(clouds))
    forced, _, _ = await nebula(*args, "--force", env=of(clouds))

    assert refused == 1
    assert "NVIDIA A40 OnDemand: gpu_usd was 0.44, and is 44.00 now" in err
    assert forced == 0
    assert ",44.00," in (tmp_path / "prices" / "runpod.csv").read_text()


async def test_a_price_of_nothing_is_not_written(clouds: Any, tmp_path: Path):
    runpod, _ = clouds
    await runpod.set_price("0", tier="OnDemand", accelerator="A40")

    code, _, err = await nebula(
        "catalog", "refresh", "runpod", "--catalog-dir", str(tmp_path / "prices"), env=of(clouds)
    )

    assert code == 1
    assert "NVIDIA A40 OnDemand: gpu_usd was 0.44, and is not told any more" in err
    assert not (tmp_path / "prices").exists()


def test_the_matrix_in_the_documentation_is_what_the_adapters_declare():
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(matrix.PAGE.read_text(encoding="utf-8")), (
        "run python -m hack.matrix"
    )


def test_each_cloud_of_the_matrix_has_its_page():
    pages = re.findall(r"\]\(([a-z_]+\.md)\)", matrix.table())

    assert pages
    assert all((matrix.PAGE.parent / page).is_file() for page in pages)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs/samples/scenarios").glob("*.yaml")), ids=lambda p: p.stem
)
def test_each_sample_scenario_can_be_read(file: Path):
    scenario.load(file)


def test_a_wrong_switch_of_the_simulator_is_named():
    from providers.runpod.simulator_rules import quirks_of

    with pytest.raises(ScenarioError, match=r"quirks\.lifecycel"):
        quirks_of({"lifecycel": "observed"})
