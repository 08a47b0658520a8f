"""SIGKILL between the create call and the commit of its answer: the machine's money is written down once."""

from app.store.engine import create_engine
from tests.chaos.world import World
from tests.support import bill


async def test_cost_26_killed_before_the_commit_there_is_one_segment_from_the_clouds_own_moment(world: World):
    controller = world.controller()
    await world.start(controller, die_at="send.after", keep=False)
    await world.create_pod("only")
    await world.died(controller)
    assert await world.rows("select from run") == await world.rows("select from billing_segment") == []

    await world.start(controller)
    await world.until_ready("only")

    async def is_booked() -> bool:
        return bool(await world.rows("select from billing_segment"))

    await world.until("a segment", is_booked)
    begins = await world.rows(
        "select min(lower(s.period)) as at, r.provider_created_at, count(distinct r.id) as runs"
        " from billing_segment s join run r on r.id = s.run_id group by 2"
    )
    assert [(row["at"], row["runs"]) for row in begins] == [(begins[0]["provider_created_at"], 1)]

    await world.delete_pods("only")
    await world.until_nothing_is_left()
    engine = create_engine(world.postgres.url_of(world.database))
    try:
        await world.until("the run's bill", lambda: bill.is_settled(engine))
        truth = await world.cloud.truth()
        assert await bill.expect_the_true_bill(engine, truth["machines"]) > 0
    finally:
        await engine.dispose()
