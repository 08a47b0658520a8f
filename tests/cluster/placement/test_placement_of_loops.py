"""An owner whose Pods end by themselves waits for its next machine: design section 5, "Loops"."""

from placement_world import World, until
from sqlalchemy import text

from app.kube.client import Obj
from app.store import backoffs
from app.store.backoffs import Failure, Pace
from app.store.engine import begin


async def fail(world: World, pod: Obj, *, wait_s: float) -> None:
    """A Pod of the same owner has ended by itself."""
    owner = pod["metadata"]["ownerReferences"][0]["uid"]
    failure = Failure(owner_uid=owner, claim_uid="c", message="shop/loop-x ended with code 3", ran_s=1)
    async with begin(world.engine) as conn:
        await backoffs.note(conn, failure, pace=Pace(base_s=wait_s, max_s=wait_s, reset_s=600))


async def test_the_next_pod_of_a_looping_owner_waits_and_says_until_when(world: World):
    await world.make_pool(await world.provider("r1"))
    pod = await world.pod("waits")
    await fail(world, pod, wait_s=600)

    async with world.placing():
        said = await world.told(pod, "OwnerBackOff")

        assert said["status"] == "False"
        assert "shop/loop-x ended with code 3 (1 in a row)" in said["message"]
        assert await world.claims_of(pod) == []
    async with begin(world.engine) as conn:
        found = await conn.execute(text("select distinct outcome from placement_decision"))
        assert found.scalars().all() == ["owner_backoff"]


async def test_a_wait_that_is_over_frees_the_pod_without_any_event(world: World):
    await world.make_pool(await world.provider("r1"))
    pod = await world.pod("goes-on")
    await fail(world, pod, wait_s=3)

    async with world.placing():
        await world.told(pod, "OwnerBackOff")

        await world.lifted(pod)


async def test_a_bare_pod_does_not_wait_for_anybody(world: World):
    await world.make_pool(await world.provider("r1"))
    looping = await world.pod("loops")
    await fail(world, looping, wait_s=600)
    bare = await world.pod("bare", owned=False)

    async with world.placing():
        await world.told(looping, "OwnerBackOff")

        async def claimed() -> list[Obj]:
            return await world.claims_of(bare)

        assert len(await until(claimed)) == 1
