"""``nebula orphans adopt``: a machine whose name was edited goes back to its own claim, and to no other."""

import asyncio
import os

from click.testing import CliRunner, Result

from app.cli import main
from app.inventory.identity import new_installation
from app.telemetry import logs
from hack.cluster import Cluster
from tests.cluster.sweep.conftest import World
from tests.support.composed import until


async def adopt(world: World, cluster: Cluster, resource: str, claim: str) -> Result:
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("NEBULA_")}
    env |= {
        "NEBULA_DATABASE_URL": world.database_url,
        "NEBULA_PROVIDERS": f"fake=fake,url={world.cloud.url}",
        "NEBULA_PROFILE": "fast",
        "NEBULA_KUBECONFIG": str(cluster.kubeconfig),
    }
    words = ["orphans", "adopt", resource, "--claim", claim, "--by", "ada"]
    done = await asyncio.to_thread(CliRunner().invoke, main, words, env=env)
    logs.configure(level="info", style="json")
    return done


async def test_a_machine_whose_name_was_edited_is_adopted_by_the_claim_that_it_was_made_for(
    world: World, cluster: Cluster
):
    claim, other = await world.claim(), await world.claim()
    name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
    ours = await world.orphan(name=world.identity(uid))
    theirs = await world.orphan(name=world.identity(installation=new_installation()))
    nobodys = await world.orphan(name="by-hand")
    async with world.leading():

        async def seen() -> bool:
            return bool(await world.rows("select 1 from instance_seen where claim_uid = :uid", uid=uid))

        await until(seen)
        await world.cloud.rename(ours["id"], "renamed")
        await world.finding(ours["id"])
    world.strangers |= {theirs["id"], nobodys["id"]}

    for resource, of, said in (
        (theirs["id"], name, "and not ours to adopt"),
        (nobodys["id"], name, "somebody else's: it carries no identity of ours, and never did"),
        (ours["id"], other["metadata"]["name"], f"was made for claim {uid}"),
        ("fake-999999", name, "fake has no machine fake-999999"),
        (ours["id"], "no-such-claim", "there is no NodeClaim no-such-claim"),
    ):
        refused = await adopt(world, cluster, resource, of)
        assert refused.exit_code == 1, refused.output
        assert said in refused.output
    assert not await world.rows("select 1 from run")

    done = await adopt(world, cluster, ours["id"], name)
    again = await adopt(world, cluster, ours["id"], name)

    assert done.exit_code == 0, done.output
    assert f"has machine {ours['id']}" in again.output
    (rental,) = await world.rows("select * from rental")
    assert (rental["claim_uid"], rental["state"], rental["resource_id"]) == (uid, "live", ours["id"])
    (run,) = await world.rows("select source from run")
    assert run["source"] == "recovered"
    closed = await world.finding(ours["id"], open_=False)
    assert closed["resolved_as"] == "adopted"
