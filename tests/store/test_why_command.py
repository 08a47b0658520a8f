"""``nebula why``, run as a command of its own on rows as placement records them."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import blocks, decisions
from app.store.blocks import Cause, Scope
from app.store.decisions import Decision
from app.store.engine import begin
from tests.store.test_commands import nebula


def candidate(provider: str, skip: str | None = None, detail: str = "", **changes: Any) -> dict[str, Any]:
    made = {"provider": provider, "account": "default", "region": "r1", "tier": "Spot", "price": None}
    return made | {"skip": skip, "detail": detail} | changes


async def record(engine: AsyncEngine, outcome: str, *candidates: Mapping[str, Any], **changes: Any) -> None:
    fields = {"pod_namespace": "team", "pod_name": "w-1", "pod_uid": "u-1", "pool": "gpu"} | changes
    async with begin(engine) as conn:
        await decisions.record(conn, [Decision(outcome=outcome, candidates=candidates, **fields)])


async def block(engine: AsyncEngine, provider: str, *, ttl_s: float, message: str) -> int:
    cause = Cause(
        kind="capacity", message=message, pool="gpu", pod_namespace="o", pod_name="p", claim_uid="c"
    )
    async with begin(engine) as conn:
        await blocks.record(
            conn, Scope(provider=provider, account="default", everything=True), cause, ttl_s=ttl_s
        )
        (found,) = await blocks.load(conn, provider=provider)
    return found.id


async def why(url: str, *words: str) -> str:
    done = await nebula("why", "w-1", "-n", "team", *words, url=url)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def why_json(url: str, *words: str) -> Any:
    return json.loads(await why(url, "-o", "json", *words))


def cells(line: str) -> list[str]:
    return re.split(r"\s{3,}", line)


async def test_a_placed_pod_shows_what_was_chosen_among_all_in_the_order_of_trying(
    engine: AsyncEngine, database_url: str
) -> None:
    await record(
        engine,
        "placed",
        candidate("gone", "provider_unregistered", "no such account is open", region=None),
        candidate("aws", price=Decimal("18.960000000"), detail="its last order was refused"),
        candidate("modal", account="prod", region="", tier="OnDemand"),
    )

    header, empty, *rows = (await why(database_url)).splitlines()

    assert re.fullmatch(r"Pod team/w-1 \(uid u-1\): placed in NodePool gpu, \d+s ago", header)
    assert empty == ""
    assert [cells(row) for row in rows] == [
        ["PROVIDER", "ACCOUNT", "REGION", "TIER", "$/H", "VERDICT", "DETAIL"],
        ["gone", "default", "<none>", "Spot", "<none>", "not configured", "no such account is open"],
        ["aws", "default", "r1", "Spot", "$18.96", "chosen", "its last order was refused"],
        ["modal", "prod", "<none>", "OnDemand", "unknown", "next", "<none>"],
    ]


async def test_equal_looks_are_counted_and_a_block_shows_its_end_and_what_the_cloud_said(
    engine: AsyncEngine, database_url: str
) -> None:
    row = await block(engine, "aws", ttl_s=7250, message="none\nleft  " + "x" * 200)
    for _ in range(3):
        await record(engine, "all_blocked", candidate("aws", "blocked", "capacity", blocks=[row]))

    header, _, _, line, *rest = (await why(database_url)).splitlines()

    assert re.search(r"all_blocked in NodePool gpu, \d+s ago; 3 equal looks since \d+s ago$", header)
    assert cells(line)[5] == "blocked"
    assert re.fullmatch(r"capacity, free in 1[12]\dm: none left x+…", cells(line)[6])
    assert len(cells(line)[6]) < 130
    title, way = rest[1:]
    assert title == "What would make it placeable:"
    assert re.fullmatch(
        r"  - waiting: aws Spot r1 \(capacity\) is tried again in 1[12]\dm;"
        rf" sooner with: nebula blocks clear {row}",
        way,
    )


async def test_a_block_that_was_cleared_since_is_shown_as_over(
    engine: AsyncEngine, database_url: str
) -> None:
    row = await block(engine, "aws", ttl_s=600, message="")
    await record(engine, "all_blocked", candidate("aws", "blocked", "capacity", blocks=[row]))
    async with begin(engine) as conn:
        await blocks.clear(conn, ids=[row])

    found = await why(database_url)

    assert re.search(r"capacity, over since \d+s ago$", found, re.MULTILINE)
    assert "the block on aws Spot r1 is over" in found


async def test_json_has_prices_as_texts_and_the_whole_message(engine: AsyncEngine, database_url: str) -> None:
    row = await block(engine, "aws", ttl_s=600, message="x" * 300)
    price = Decimal("0.100000001")
    await record(engine, "all_blocked", candidate("aws", "blocked", "capacity", blocks=[row], price=price))

    found = await why_json(database_url)

    assert (found["namespace"], found["pod"], found["uid"]) == ("team", "w-1", "u-1")
    assert (found["pool"], found["outcome"], found["looks"]) == ("gpu", "all_blocked", 1)
    assert found["decidedAt"].endswith("Z")
    (place,) = found["candidates"]
    (met,) = place.pop("blocks")
    assert place == {
        "provider": "aws",
        "account": "default",
        "region": "r1",
        "tier": "Spot",
        "usdPerHour": "0.100000001",
        "verdict": "blocked",
        "skip": "blocked",
        "detail": "capacity",
        "forGood": False,
    }
    assert (met["id"], met["reason"], met["message"]) == (row, "capacity", "x" * 300)
    assert len(found["placeable"]) == 1


@pytest.mark.parametrize(
    ("place", "verdict", "way"),
    [
        (
            candidate(
                "aws", "price", "$7.10 an hour, at most $2 by the pool's maxPrice", price=Decimal("7.1")
            ),
            "too dear",
            "raise the pool's maxPrice to at least $7.10 an hour, the price of aws Spot r1",
        ),
        (
            candidate("aws", "limit", "12 GPUs of limits.gpus 16 are taken, and it asks for 8", region=None),
            "over the pool's limit",
            "a Pod of NodePool gpu ends, or its limit is raised:"
            " 12 GPUs of limits.gpus 16 are taken, and it asks for 8",
        ),
        (
            candidate("aws", "node_unavailable", "node nebula-aws is cordoned", region=None),
            "without an available node",
            "kubectl uncordon nebula-aws",
        ),
        (
            candidate("aws", "accelerator_unsupported", "it offers no t4:1", region=None, for_good=True),
            "without the accelerator",
            "ask for another accelerator or count, or add a provider or region that offers it to NodePool gpu"
            " (aws Spot: it offers no t4:1)",
        ),
    ],
    ids=["price", "limit", "node", "accelerator"],
)
async def test_a_pod_without_candidate_says_what_would_help(
    engine: AsyncEngine, database_url: str, place: dict[str, Any], verdict: str, way: str
) -> None:
    await record(engine, "no_candidate", place)

    text, found = await why(database_url), await why_json(database_url)

    assert found["candidates"][0]["verdict"] == verdict
    assert found["placeable"] == [way]
    assert cells(text.splitlines()[3])[5:] == [verdict, place["detail"]]
    assert text.endswith(f"\nWhat would make it placeable:\n  - {way}\n")


async def test_a_decision_without_candidates_has_no_table(engine: AsyncEngine, database_url: str) -> None:
    await record(engine, "no_pool", pool=None)

    header, *rest = (await why(database_url)).splitlines()

    assert re.fullmatch(r"Pod team/w-1 \(uid u-1\): no_pool, \d+s ago", header)
    assert rest[:2] == ["", "What would make it placeable:"]
    assert "nebula.inftyai.com/nodepool" in rest[2]


async def test_the_newest_pod_of_a_name_is_meant_and_a_uid_picks_another(
    engine: AsyncEngine, database_url: str
) -> None:
    await record(engine, "no_candidate", candidate("aws", "price"))
    await record(engine, "placed", candidate("aws"))
    await record(engine, "no_pool", pod_uid="u-2")
    await record(engine, "no_pool", pod_uid="u-3", pod_namespace="other")

    newest = await why_json(database_url)
    older = await why_json(database_url, "--uid", "u-1")
    wrong = await nebula("why", "w-1", "-n", "team", "--uid", "u-3", url=database_url)

    assert (newest["uid"], newest["outcome"]) == ("u-2", "no_pool")
    assert (older["uid"], older["outcome"]) == ("u-1", "placed")
    assert wrong.returncode == 1
    assert wrong.stderr == "Error: no Pod team/w-1 with UID u-3 is on record; known are: u-2, u-1\n"


async def test_a_pod_that_is_not_on_record_says_what_to_check(database_url: str) -> None:
    done = await nebula("why", "w-1", url=database_url)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: no decision on Pod default/w-1 is on record; check\n")
    for word in ("-n", "nebula.inftyai.com/enabled=true", "nebula.inftyai.com/provider-selection"):
        assert word in done.stderr
    with psycopg.connect(database_url.replace("+asyncpg", "")) as conn:
        password = conn.info.password
    assert not password or password not in done.stderr


async def test_help_imports_neither_database_nor_placement() -> None:
    program = (
        "import sys; import app.cli.why;"
        "print([name for name in ('sqlalchemy', 'pydantic', 'app.placement.rank') if name in sys.modules])"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


async def test_a_look_that_came_to_no_candidates_shows_what_the_pod_was_told(
    engine: AsyncEngine, database_url: str
) -> None:
    await record(engine, "no_pool", pool=None, message="NodePool gpx does not exist")

    header, _, message, _, title, way = (await why(database_url)).splitlines()

    assert "no_pool" in header
    assert message == "NodePool gpx does not exist"
    assert title == "What would make it placeable:"
    assert way.startswith("  - the label nebula.inftyai.com/nodepool must name a NodePool that exists")
    assert (await why_json(database_url))["message"] == "NodePool gpx does not exist"
