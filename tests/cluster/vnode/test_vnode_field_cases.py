"""Pods and nodes while their cloud, their controller or the API server is away, as other people met it."""

import asyncio
from typing import Any

from app.kube import paths
from app.kube.client import Obj
from app.kube.errors import Unreachable
from tests.cluster.vnode.test_vnode_environment import a_config_map, a_secret, arrived, digests
from tests.cluster.vnode.vnode_world import World, state_of


async def delete(world: World, pod: Obj, **options: Any) -> None:
    await world.kube.delete(paths.pod(world.namespace, pod["metadata"]["name"]), **options)


async def one(world: World, query: str) -> Any:
    async with world.engine.connect() as conn:
        return (await conn.exec_driver_sql(query)).first()


async def test_fc_005_fx_01_a_pod_deleted_while_its_cloud_is_out_of_reach_stays_until_the_machine_is_gone(
    world: World,
) -> None:
    """Time-outs, not refusals; and our own restart among them. Nothing is written down as ended before."""
    async with world.running(call_timeout_s=0.3):
        pod = await world.pod(terminationGracePeriodSeconds=1)
        await world.until_ready(pod)
        held = await world.cloud.pause()
        await delete(world, pod)
        await world.until_event(pod, "TerminateRetrying")

    async with world.running(call_timeout_s=0.3):
        await asyncio.sleep(1.0)  # an outage goes on for a while, whatever we do
        assert await world.see(pod) is not None
        assert (await one(world, "select gone_at from run"))[0] is None
        assert (await one(world, "select state from rental"))[0] != "ended"
        assert len(await world.cloud.alive()) == 1
        await world.cloud.resume(held)

        await world.until_gone(pod)
        assert await world.cloud.alive() == []


async def test_fc_054_pods_that_were_deleted_while_nobody_watched_give_their_machines_back(
    world: World,
) -> None:
    async with world.running():
        pods = [await world.pod() for _ in range(3)]
        for pod in pods:
            await world.until_ready(pod)
    for pod in pods:
        await delete(world, pod)
    assert len(await world.cloud.alive()) == 3

    async with world.running():
        for pod in pods:
            await world.until_gone(pod)
        assert await world.cloud.alive() == []


async def test_fc_046_a_node_that_went_while_its_controller_was_away_comes_back_under_its_pods(
    world: World,
) -> None:
    """As a cloud's own controller does with a node that is silent, and that its cloud does not know."""
    async with world.running():
        pod = await world.pod()
        before = await world.until_ready(pod)
        old = await world.kube.get(paths.node(world.node))
    await world.kube.delete(paths.node(world.node))

    async with world.running():

        async def back() -> bool:
            found = await world.kube.find(paths.node(world.node))
            return found is not None and found["metadata"]["uid"] != old["metadata"]["uid"]

        await world.until_true(back)
        await world.rounds(3)
        after = await world.see(pod)

    assert after is not None
    assert after["status"] == before["status"]
    assert len(await world.cloud.machines()) == len(await world.cloud.alive()) == 1


async def test_fc_066_a_deadline_counts_from_the_pods_start_also_over_a_restart(world: World) -> None:
    async with world.running():
        pod = await world.pod(activeDeadlineSeconds=3)
        await world.until_ready(pod)

    async with world.running():
        over = await world.until_reason(pod, "DeadlineExceeded")
        assert await world.cloud.alive() == []
    assert over["status"]["phase"] == "Failed"


async def test_fx_03_a_workload_that_ended_while_nobody_looked_is_over_and_not_begun_again(
    world: World,
) -> None:
    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)
    await world.cloud.exit(machine, code=3)

    async with world.running():
        over = await world.until(pod, lambda seen: seen["status"]["phase"] == "Failed")
        await world.cloud.until(lambda truth: truth["machines"][0]["state"] == "gone", what="the release")

    assert state_of(over)["terminated"]["exitCode"] == 3
    assert sum((await world.cloud.creates()).values()) == 1


async def test_fx_04_an_end_that_the_api_server_did_not_take_is_written_when_it_does(world: World) -> None:
    refused = 0

    async def refuse(what: str, whose: str) -> None:
        nonlocal refused
        if what == "PATCH pods/status" and refused < 3:
            refused += 1
            raise Unreachable(f"kept back by the test: {whose}")

    async with world.running():
        pod = await world.pod()
        machine = await world.machine_of(pod)
        world.wire.before = refuse
        await world.cloud.exit(machine, code=0)

        await world.until(pod, lambda seen: seen["status"]["phase"] == "Succeeded")
    assert refused == 3


PLAIN = {
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "BASE64": "aGk==",
    "URL": "https://host/path?a=1&b=%20#part",
    "JSON": '{"a": "b=c", "d": [1, 2]}',
    "FLAG": "--flag=x",
    "BLANKS": "  x  ",
    "LINES": "one\ntwo\n",
    "PERCENT": "100% #1",
    "app.dotted-name": "x",
}


async def test_fc_126_fc_127_fc_128_fc_129_fc_130_fc_037_whatever_a_workload_starts_with_arrives_unchanged(
    world: World,
) -> None:
    """20 KB of environment, a script of 30 KB, ten ConfigMaps, empty values, '=' and what else there was."""
    await a_secret(world, "db", password="p=w==", nothing="")
    await a_config_map(world, "conf", nothing="")
    maps = {f"conf-{n}": {f"KEY_{n}": str(n) * 2000} for n in range(10)}
    for name, data in maps.items():
        await a_config_map(world, name, **data)
    accounts = f"/api/v1/namespaces/{world.namespace}/serviceaccounts"
    await world.kube.create(
        accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "own"}}
    )
    script = "echo 'a=b'; " * 2400
    argv = ["-c", script, "two words", "", "$(EQUALS)", "$$(EQUALS)", '"', "é"]
    container: dict[str, Any] = {
        "name": "workload",
        "image": "nvidia/cuda:12.4.1-base-ubuntu22.04",
        "args": argv,
        "envFrom": [{"configMapRef": {"name": name}} for name in maps] + [{"secretRef": {"name": "db"}}],
        "env": [
            *({"name": name, "value": value} for name, value in PLAIN.items()),
            {"name": "NO_VALUE"},
            {"name": "TWICE", "value": "1"},
            {"name": "TWICE", "value": "$(TWICE)2"},
            {"name": "LARGE", "value": "x" * 20_000},
            {"name": "FROM_KEY", "valueFrom": {"secretKeyRef": {"name": "db", "key": "nothing"}}},
            {"name": "FROM_MAP", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "nothing"}}},
            {"name": "SPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['absent']"}}},
            {"name": "ACCOUNT", "valueFrom": {"fieldRef": {"fieldPath": "spec.serviceAccountName"}}},
        ],
    }
    async with world.running():
        pod = await world.pod(
            containers=[container], serviceAccountName="own", automountServiceAccountToken=False
        )
        found = await arrived(world, pod)

    keys_of_maps = {key: value for data in maps.values() for key, value in data.items()}
    assert found == digests(
        **PLAIN,
        **keys_of_maps,
        password="p=w==",
        nothing="",
        NO_VALUE="",
        TWICE="12",
        LARGE="x" * 20_000,
        FROM_KEY="",
        FROM_MAP="",
        SPACE=world.namespace,
        NOTE="",
        ACCOUNT="own",
    )
    (machine,) = await world.cloud.machines()
    assert machine["args"] == ["-c", script, "two words", "", "a=b=c", "$(EQUALS)", '"', "é"]
