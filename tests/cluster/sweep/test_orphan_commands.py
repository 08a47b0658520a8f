"""``nebula orphans`` and ``nebula sweep``: a real Postgres, a fake cloud, and no leader."""

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.cli import main
from app.inventory.identity import Identity, new_installation
from app.store import findings
from app.store.engine import begin, database_now
from app.store.findings import Run
from app.store.installation import get_or_create, hold
from app.telemetry import logs
from providers.base import ClaimUid
from tests.support.clouds import FakeCloud

US, THEM = new_installation(), new_installation()


@pytest.fixture(autouse=True)
async def _installed(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await get_or_create(conn, new_id=US)


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has said."""

    returncode: int
    stdout: str
    stderr: str


class Nebula:
    """The command line, with this database and this cloud."""

    def __init__(self, url: str, cloud: FakeCloud) -> None:
        self._env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("NEBULA_")}
        self._env |= {
            "NEBULA_DATABASE_URL": url,
            "NEBULA_PROVIDERS": f"fake=fake,url={cloud.url}",
            "NEBULA_PROFILE": "fast",
            "KUBECONFIG": "/nonexistent",
        }

    async def __call__(self, *words: str, **env: str) -> Done:
        done = await asyncio.to_thread(CliRunner().invoke, main, words, env=self._env | env)
        logs.configure(level="info", style="json")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def nebula(database_url: str, cloud: FakeCloud) -> Nebula:
    return Nebula(database_url, cloud)


def identity(installation: str = US, *, uid: str | None = None) -> str:
    claim = ClaimUid(uid or str(uuid4()))
    return str(Identity(installation=installation, claim_uid=claim, attempt=1, sequence=1))


async def planted(cloud: FakeCloud, name: str | None) -> str:
    machine = await cloud.plant(name=name, region="r1", accelerator="H100")
    return str(machine["id"])


async def a_rental(engine: AsyncEngine, *, uid: str, state: str = "open", provider: str = "fake") -> None:
    async with begin(engine) as conn:
        await conn.execute(
            text("""
                insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                    account, region, tier, accelerator, state, epoch)
                values (:uid, 'ml-train', 'ml', 'train', 'p', 'gpu', :provider, 'default', 'r1', 'OnDemand',
                    'H100:1', :state, 0)
            """),
            {"uid": uid, "state": state, "provider": provider},
        )


async def one(engine: AsyncEngine, query: str) -> Any:
    async with begin(engine) as conn:
        return (await conn.execute(text(query))).mappings().one()


async def test_a_clean_account_exits_zero_and_says_the_bound(nebula: Nebula, cloud: FakeCloud):
    done = await nebula("orphans")

    assert done.returncode == 0, done.stderr
    assert f"INSTALLATION {US}" in done.stdout
    assert "LISTS fake ok (2 regions)" in done.stdout
    assert "an orphan of ours has ended within" in done.stdout
    assert "TOTAL OURS  0 findings" in done.stdout


async def test_findings_exit_two_with_the_money_at_stake_and_others_counted(nebula: Nebula, cloud: FakeCloud):
    orphan = await planted(cloud, identity())
    await planted(cloud, identity(THEM))
    await planted(cloud, "by-hand")

    table = await nebula("orphans")
    as_json = json.loads((await nebula("orphans", "audit", "-o", "json")).stdout)
    as_csv = (await nebula("orphans", "-o", "csv", "--kind", "no-claim")).stdout.splitlines()

    assert table.returncode == 2
    (row,) = [line for line in table.stdout.splitlines() if line.startswith("no-claim")]
    assert orphan in row
    assert "4.00" in row
    assert f"installation {THEM}" in table.stdout
    assert "1 finding · 4.00 $/h" in table.stdout
    (found,) = as_json["findings"]
    assert (found["resource"], found["usdPerHour"], found["by"]) == (orphan, "4.00", "sweep")
    assert {each["installation"] for each in as_json["notOurs"]} == {None, THEM}
    assert as_csv[0].startswith("KIND,PROVIDER,INSTANCE")
    assert as_csv[1].startswith("no-claim,fake")
    assert len(await cloud.alive()) == 3


async def test_a_list_that_is_not_whole_exits_three(nebula: Nebula, cloud: FakeCloud):
    await planted(cloud, identity())
    await cloud.add_fault("status", verb="list", status=500, region="r2", unlimited=True)

    done = await nebula("orphans")

    assert done.returncode == 3
    assert "fake INCOMPLETE" in done.stdout


async def test_an_account_without_the_right_to_list_is_said_and_nothing_concluded(
    nebula: Nebula, cloud: FakeCloud
):
    await planted(cloud, identity())
    await cloud.add_fault("expired", verb="list", unlimited=True)

    done = await nebula("orphans")

    assert done.returncode == 3
    assert "INCOMPLETE" in done.stdout
    assert "no-claim" not in done.stdout


async def test_explain_goes_rule_by_rule(nebula: Nebula, cloud: FakeCloud):
    orphan, theirs = await planted(cloud, identity()), await planted(cloud, identity(THEM))

    ours = await nebula("orphans", "explain", orphan)
    others = await nebula("orphans", "explain", theirs)
    nobody = await nebula("orphans", "explain", "fake-999999")

    assert ours.returncode == 0, ours.stderr
    for words in (
        "ok  S20 ours",
        "NO  claim",
        "NO  rental",
        "NO  S7 sightings",
        "no-claim: no claim and no row",
    ):
        assert words in ours.stdout
    assert "never touched: it is installation" in others.stdout
    assert nobody.returncode == 1
    assert "no list shows fake-999999" in nobody.stderr


async def test_offline_identity_needs_neither_database_nor_cluster(nebula: Nebula, cloud: FakeCloud):
    uid = str(uuid4())
    await planted(cloud, identity(uid=uid))
    await cloud.plant(name=identity(), region="r2")
    await planted(cloud, identity(THEM))

    done = await nebula("orphans", "audit", "--offline-identity", US, "-o", "json", NEBULA_DATABASE_URL="")
    none = await nebula("orphans", "audit", "--offline-identity", new_installation(), NEBULA_DATABASE_URL="")
    wrong = await nebula("orphans", "audit", "--offline-identity", "prod-eu", NEBULA_DATABASE_URL="")

    machines = json.loads(done.stdout)["machines"]
    assert {machine["region"] for machine in machines} == {"r1", "r2"}
    assert uid in {machine["claim"] for machine in machines}
    assert len(machines) == 2
    assert (done.returncode, none.returncode, wrong.returncode) == (2, 0, 2)
    assert "ten of a-z and 2-7" in wrong.stderr


async def test_sweep_plans_by_default_and_executes_only_with_the_installation_typed_back(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    await planted(cloud, identity())

    plan = await nebula("sweep")
    bare = await nebula("sweep", "--execute")
    wrong = await nebula("sweep", "--execute", "--confirm", THEM)

    assert plan.returncode == 2
    assert f"nebula sweep --execute --confirm {US} --plan" in plan.stdout
    assert "--execute needs --confirm" in bare.stderr
    assert f"this is installation {US}; nothing was done" in wrong.stderr
    assert (await one(engine, "select count(*) as n from orphan_finding"))["n"] == 0
    assert len(await cloud.alive()) == 1


async def test_an_approval_is_for_the_plan_that_was_seen_and_not_for_an_old_or_another_one(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    await planted(cloud, identity())
    text_ = (await nebula("sweep")).stdout
    plan = text_.split("PLAN  ")[1].split()[0]
    confirm = ("sweep", "--execute", "--confirm", US, "--wait", "0")

    old = await nebula(*confirm, "--plan", f"20200101T000000Z-{plan.split('-')[1]}")
    await planted(cloud, identity())
    other = await nebula(*confirm, "--plan", plan)
    fresh = await nebula(*confirm, "--by", "ada")

    assert "minutes old: look again" in old.stderr
    assert "not what that plan said" in other.stderr
    assert fresh.returncode == 2, fresh.stderr  # approved, and no leader is there to end them
    assert "approved by ada: 2 findings" in fresh.stdout
    row = await one(engine, "select count(*) as n, min(approved_by) as by from orphan_finding")
    assert (row["n"], row["by"]) == (2, "ada")


async def test_nothing_is_approved_while_sweeps_are_held(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    await planted(cloud, identity())
    async with begin(engine) as conn:
        await hold(conn, "rows are missing")

    done = await nebula("sweep", "--execute", "--confirm", US)

    assert done.returncode == 1
    assert "sweeps are held: rows are missing" in done.stderr
    assert (await one(engine, "select count(*) as n from orphan_finding"))["n"] == 0


async def test_protect_wants_a_machine_of_ours_and_an_end(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    orphan = await planted(cloud, identity())
    async with begin(engine) as conn:
        await conn.execute(
            text("""
                insert into instance_seen (provider, account, resource_id, region, state, claim_uid)
                values ('fake', 'default', :id, 'r1', 'running', 'u')
            """),
            {"id": orphan},
        )

    unknown = await nebula("orphans", "protect", "fake-9", "--until", "2h", "--reason", "look")
    endless = await nebula("orphans", "protect", orphan, "--until", "400d", "--reason", "look")
    past = await nebula("orphans", "protect", orphan, "--until", "2020-01-01T00:00:00+00:00", "--reason", "x")
    naive = await nebula("orphans", "protect", orphan, "--until", "2027-01-01", "--reason", "x")
    done = await nebula("orphans", "protect", orphan, "--until", "2h", "--reason", "look", "--by", "ada")
    table = await nebula("orphans")

    assert "no machine or part of ours has the id fake-9" in unknown.stderr
    assert "at most 30 days" in endless.stderr
    assert "in the past" in past.stderr
    assert "names no zone" in naive.stderr
    assert done.returncode == 0, done.stderr
    assert "protected until" in table.stdout


async def test_forget_wants_the_installation_and_an_account_that_is_lost(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    uid = str(uuid4())
    await a_rental(engine, uid=uid, provider="lost")
    await a_rental_here(engine)
    words = (
        "orphans",
        "forget",
        uid,
        "--reason",
        "the account was closed",
        "--by",
        "ada",
        "--cluster-is-lost",
    )

    wrong = await nebula(*words, "--confirm", THEM)
    unknown = await nebula("orphans", "forget", "nobody", "--reason", "x", "--confirm", US)
    reachable = await nebula(
        "orphans", "forget", "here", "--reason", "x", "--confirm", US, "--cluster-is-lost"
    )
    await a_sweep(engine, provider="lost", unknown=None)
    listed = await nebula(*words, "--confirm", US)
    await a_sweep(engine, provider="lost", unknown="401")
    done = await nebula(*words, "--confirm", US)

    assert "nothing was done" in wrong.stderr
    assert "no claim nobody was ever rented for" in unknown.stderr
    assert "answers, and the claim's end will be proven" in reachable.stderr
    assert "the controller lists account lost/default" in listed.stderr
    assert done.returncode == 0, done.stderr
    rental = await one(engine, f"select state, ending_reason from rental where claim_uid = '{uid}'")
    assert (rental["state"], rental["ending_reason"]) == ("ended", "forgotten by ada: the account was closed")
    event = await one(engine, "select by, detail from orphan_event where what = 'resolved'")
    assert (event["by"], event["detail"]["as"]) == ("ada", "forgotten")


async def test_forget_is_refused_where_the_account_was_listed_whole_lately(
    nebula: Nebula, engine: AsyncEngine
):
    uid = str(uuid4())
    await a_rental(engine, uid=uid, provider="theirs")
    async with begin(engine) as conn:
        await conn.execute(
            text("""
                insert into list_round (provider, account, region, complete, machines, began_at,
                    last_began_at, last_ended_at)
                values ('theirs', 'default', '', true, 1, now(), now(), now() - interval '1 minute')
            """)
        )
    words = ("orphans", "forget", uid, "--reason", "x", "--confirm", US, "--cluster-is-lost")

    refused = await nebula(*words)
    async with begin(engine) as conn:
        untouched = (await conn.execute(text("select state from rental"))).scalar_one()
        await conn.execute(text("update list_round set last_ended_at = now() - interval '11 minutes'"))
    done = await nebula(*words)

    assert refused.returncode == 1
    assert "account theirs/default was listed whole" in refused.stderr
    assert "a controller has it open" in refused.stderr
    assert untouched == "open"
    assert done.returncode == 0, done.stderr


async def test_forget_is_refused_where_nobody_can_say_whether_the_pod_wants_the_machine(
    nebula: Nebula, engine: AsyncEngine
):
    uid = str(uuid4())
    await a_rental(engine, uid=uid, provider="lost")

    refused = await nebula("orphans", "forget", uid, "--reason", "x", "--confirm", US)

    assert refused.returncode == 1
    assert "whether Pod ml/train still wants the machine cannot be read" in refused.stderr
    assert "--cluster-is-lost" in refused.stderr
    assert (await one(engine, "select state from rental"))["state"] == "open"


async def test_without_providers_no_account_is_gone_and_nothing_is_forgotten(
    nebula: Nebula, engine: AsyncEngine
):
    uid = str(uuid4())
    await a_rental(engine, uid=uid)

    table = await nebula("orphans", NEBULA_PROVIDERS="")
    plan = await nebula("sweep", "--execute", "--confirm", US, NEBULA_PROVIDERS="")
    words = ("orphans", "forget", uid, "--reason", "x", "--confirm", US, "--cluster-is-lost")
    refused = await nebula(*words, NEBULA_PROVIDERS="")

    assert table.returncode == 3
    assert "no providers are given" in table.stdout
    assert "provider-removed" not in table.stdout
    assert "no providers are given" in plan.stdout
    assert refused.returncode == 1
    assert "no providers are given" in refused.stderr
    assert (await one(engine, "select state from rental"))["state"] == "open"


async def a_sweep(engine: AsyncEngine, *, provider: str, unknown: str | None) -> None:
    """What the controller was told, an instant ago."""
    place = {"provider": provider, "account": "default", "region": "", "machines": 1, "unknown": unknown}
    async with begin(engine) as conn:
        run = Run(
            started_at=await database_now(conn),
            version="1",
            mode="sweep",
            leader="test",
            ours=1,
            places=[place],
        )
        await findings.ran(conn, run)


async def a_rental_here(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await conn.execute(
            text("""
                insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                    account, region, tier, accelerator, state, epoch)
                values ('here', 'here', 'ml', 'here', 'q', 'gpu', 'fake', 'default', 'r1', 'OnDemand',
                    'H100:1', 'open', 0)
            """)
        )


@pytest.mark.field_case("FC-024")
async def test_orphans_14_a_provider_with_claims_cannot_be_left_out(nebula: Nebula, engine: AsyncEngine):
    fine = await nebula("orphans", "check-providers")
    await a_rental(engine, uid=str(uuid4()), provider="dropped")

    refused = await nebula("orphans", "check-providers")
    table = await nebula("orphans")
    nowhere = "postgresql://nebula@127.0.0.1:9/nebula"
    away = await nebula("orphans", "check-providers", NEBULA_DATABASE_URL=nowhere)
    let_through = await nebula("orphans", "check-providers", "--unless-away", NEBULA_DATABASE_URL=nowhere)

    assert (away.returncode, let_through.returncode) == (1, 0)
    assert "not checked, the database gives no answer" in let_through.stderr
    assert fine.returncode == 0, fine.stderr
    assert refused.returncode == 2
    assert "provider dropped/default must stay configured: 1 claims" in refused.stderr
    assert "provider-removed" in table.stdout


async def test_commands_say_when_no_controller_has_run_with_the_database(nebula: Nebula, engine: AsyncEngine):
    async with begin(engine) as conn:
        await conn.execute(text("delete from installation"))

    done = await nebula("orphans")

    assert done.returncode == 1
    assert "no controller has run with it yet" in done.stderr


async def test_the_views_have_what_was_found_and_sql_prints_the_query(
    nebula: Nebula, cloud: FakeCloud, engine: AsyncEngine
):
    await planted(cloud, identity())
    await nebula("sweep", "--execute", "--confirm", US, "--wait", "0")

    for name in ("orphan_open", "orphan_history", "orphan_cost"):
        assert await one(engine, f"select * from {name}")
    for name in ("instance_inventory", "sweep_health", "unowned_spend", "waste"):
        async with begin(engine) as conn:
            await conn.execute(text(f"select * from {name}"))
    assert (await one(engine, (await nebula("orphans", "--sql")).stdout))["usd_per_hour"] == 4


async def test_options_that_an_adapter_refuses_are_said_in_one_line(nebula: Nebula):
    refused = await nebula("orphans", NEBULA_PROVIDERS="fake=fake,url=nowhere")
    unknown = await nebula("orphans", NEBULA_PROVIDERS="moon")

    assert refused.returncode == 2
    assert "option url must be" in refused.stderr
    assert "no adapter 'moon'" in unknown.stderr
