"""Starts of a controller that sees little or late, as other people met them."""

from typing import Any, Literal

import pytest

from app.api import keys
from app.claims.controller import Claims
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube
from app.kube.errors import KubeError
from tests.cluster.claims.conftest import World
from tests.cluster.claims.test_claims_pools import a_pool, until_placed
from tests.cluster.claims.test_claims_release import bound
from tests.support import composed
from tests.support.composed import until


class Deaf:
    """In front of a client's transport: lists of Pods fail as a whole, or after their first page."""

    def __init__(self, kube: Kube) -> None:
        self.fails: Literal["all", "rest"] | None = "all"
        self.failed = 0
        self._transport = kube._transport
        self.kube = kube.room("deaf")
        self.kube._transport = self  # type: ignore[assignment]

    async def send(self, method: str, path: str, **request: Any) -> bytes:
        if "/pods" in path and (self.fails == "all" or (self.fails == "rest" and "continue=" in path)):
            self.failed += 1
            raise KubeError(403, reason="Forbidden", message="pods is forbidden in one namespace")
        return await self._transport.send(method, path, **request)

    def lines(self, *args: Any, **kwargs: Any) -> Any:
        return self._transport.lines(*args, **kwargs)


async def test_fc_048_nothing_is_cleaned_up_before_every_pod_was_seen(world: World):
    """A start with no list of Pods, then with half of one: all live on. With the whole one, ends are seen."""
    async with world.leading() as term:
        pairs = [await bound(world, term, f"p{n}") for n in range(3)]

    deaf = Deaf(world.kube)
    async with composed.composed(
        world.kube, world.engine, clouds={"modal": world.cloud}, installation=world.installation
    ) as term:
        selector = f"{keys.ENABLED_LABEL}={keys.ENABLED}"
        pods = Cache(
            deaf.kube, paths.pods(), label_selector=selector, page=1, base_delay_s=0.01, max_delay_s=0.05
        )
        claims = Claims(
            kube=world.kube,
            claims=term.claims,
            bindings=term.bindings,
            pods=pods,
            pools=term.pools,
            provisioning=term.provisioning,
            accounts_names=term.accounts.names,
            settings=term.settings,
            events=term.events,
        )
        term.start(pods.run())
        term.start(claims.run())
        for part in ("all", "rest"):
            deaf.fails, deaf.failed = part, 0  # type: ignore[assignment]
            lists = (await world.cloud.truth())["calls"]["list"]
            await world.cloud.until(lambda truth, n=lists: truth["calls"]["list"] > n + 4)
            await until(lambda: deaf.failed > 3)
            assert not pods.is_synced
            assert len(await world.cloud.alive()) == 3
            for _, claim in pairs:
                live = await world.live(claim)
                assert live is not None
                assert "deletionTimestamp" not in live["metadata"]

        deaf.fails = None
        await pods.synced()
        await world.remove_pod(pairs[0][0])
        await world.until_gone(pairs[0][1])
        assert len(await world.cloud.alive()) == 2
        for _, claim in pairs[1:]:
            assert (await world.status(claim))["phase"] == "Bound"


async def test_fx_02_what_is_left_of_an_ended_machine_brings_no_pod_back(world: World):
    """Its Pod was deleted while no controller ran, and the cloud still shows it as ended."""
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
    (machine,) = await world.cloud.alive()
    await world.cloud.exit(machine["id"], code=0)
    await world.remove_pod(pod)

    async with world.leading():
        await world.until_gone(claim)

    assert await world.cloud.alive() == []
    assert (await world.kube.get(paths.pods(world.namespace)))["items"] == []


@pytest.mark.field_case("FC-020")
@pytest.mark.parametrize("how", ["Foreground", "Orphan"])
async def test_a_pool_deleted_in_either_way_of_cascading_takes_no_claim_along_and_then_goes(
    world: World, how: Literal["Foreground", "Orphan"]
):
    pool = await a_pool(world, ["modal"])
    name = pool["metadata"]["name"]
    async with world.leading() as term:
        pod = await world.pod("a", pool=name)
        claim = await world.claim(pod)
        await term.rent(claim)
        await until_placed(world, pool, {"modal": 1})

        await world.kube.delete(paths.nodepool(name), propagation=how)
        lists = (await world.cloud.truth())["calls"]["list"]
        await world.cloud.until(lambda truth: truth["calls"]["list"] > lists + 3)
        live = await world.live(claim)
        assert live is not None
        assert "deletionTimestamp" not in live["metadata"]
        with pytest.raises(KubeError):  # nobody can put another one of that name in its place
            await world.kube.create(paths.nodepools(), {**pool, "metadata": {"name": name}})

        await world.remove_pod(pod)
        await world.until_gone(claim)

        async def gone() -> bool:
            return await world.kube.find(paths.nodepool(name)) is None

        await until(gone)
