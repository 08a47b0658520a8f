"""The commands about orphans and the cluster that they read: its Pods speak for machines, if it is ours."""

import asyncio
import os

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

from app.api import keys
from app.cli import main
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.client import Obj
from app.kube.installation import INSTALLATION_SECRET
from app.store.engine import begin
from app.store.installation import get_or_create
from app.telemetry import logs
from hack.cluster import Cluster
from tests.cluster.sweep.conftest import World
from tests.support import composed


class Nebula:
    """The command line of a world, in a namespace with a Secret of its own."""

    def __init__(self, world: World, cluster: Cluster, namespace: str) -> None:
        self._env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("NEBULA_")}
        self._env |= {
            "NEBULA_DATABASE_URL": world.database_url,
            "NEBULA_PROVIDERS": f"fake=fake,url={world.cloud.url}",
            "NEBULA_PROFILE": "fast",
            "NEBULA_KUBECONFIG": str(cluster.kubeconfig),
            "NEBULA_NAMESPACE": namespace,
        }

    async def __call__(self, *words: str) -> Result:
        done = await asyncio.to_thread(CliRunner().invoke, main, words, env=self._env)
        logs.configure(level="info", style="json")
        return done


@pytest.fixture
async def nebula(world: World, cluster: Cluster) -> Nebula:
    async with begin(world.engine) as conn:
        await get_or_create(conn, new_id=world.installation)
    namespace = f"of-{world.installation}"
    await world.kube.create(
        paths.namespaces(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    )
    return Nebula(world, cluster, namespace)


async def say_whose(world: World, installation: str) -> None:
    """The cluster's Secret, as a controller makes it."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": INSTALLATION_SECRET},
        "stringData": {"id": installation},
    }
    await world.kube.create(paths.secrets(f"of-{world.installation}"), secret)


async def a_live_rental(world: World, claim: Obj, pod: Obj, *, provider: str) -> None:
    async with begin(world.engine) as conn:
        await conn.execute(
            text("""
                insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                    account, region, tier, accelerator, state, resource_id, epoch)
                values (:uid, :name, :namespace, :pod, :pod_uid, 'gpu', :provider, 'default', 'r1',
                    'OnDemand', 'H100:1', 'live', 'm-1', 0)
            """),
            {
                "uid": claim["metadata"]["uid"],
                "name": claim["metadata"]["name"],
                "namespace": pod["metadata"]["namespace"],
                "pod": pod["metadata"]["name"],
                "pod_uid": pod["metadata"]["uid"],
                "provider": provider,
            },
        )


async def test_forget_is_refused_while_the_claim_has_a_pod_that_is_not_over(world: World, nebula: Nebula):
    await say_whose(world, world.installation)
    name = f"train-{world.installation}"
    pod = await composed.a_pod(world.kube, "default", name=name)
    claim = await composed.a_claim(
        world.kube, pod, installation=world.installation, provider="lost", bound=False
    )
    await a_live_rental(world, claim, pod, provider="lost")
    words = ("orphans", "forget", claim["metadata"]["name"], "--reason", "x", "--confirm", world.installation)

    refused = await nebula(*words)
    (before,) = await world.rows("select state from rental")
    await world.kube.delete(paths.pod("default", name))
    done = await nebula(*words)

    assert refused.exit_code == 1
    assert f"its Pod default/{name} is not over: delete the Pod first" in refused.output
    assert before["state"] == "live"
    assert done.exit_code == 0, done.output


async def test_another_installations_cluster_is_refused_by_every_command_that_reads_claims(
    world: World, nebula: Nebula
):
    theirs = new_installation()
    await say_whose(world, theirs)
    claim = await world.claim()
    pod: Obj = {"metadata": {"namespace": "sweep", "name": "p", "uid": "u", "labels": {}}}
    await a_live_rental(world, claim, pod, provider="lost")
    orphan = await world.orphan()
    name, us = claim["metadata"]["name"], world.installation
    assert keys.CLAIM_FINALIZER in claim["metadata"]["finalizers"]

    for words in (
        ("orphans",),
        ("orphans", "explain", orphan["id"]),
        ("sweep",),
        ("sweep", "--execute", "--confirm", us),
        ("orphans", "adopt", orphan["id"], "--claim", name),
        ("orphans", "forget", name, "--reason", "x", "--confirm", us),
    ):
        refused = await nebula(*words)
        assert refused.exit_code == 3, (words, refused.output)
        assert (
            f"the database is of installation {us}, and the cluster of installation {theirs}"
            in refused.output
        )
    assert not await world.rows("select 1 from orphan_finding")
    (rental,) = await world.rows("select state from rental")
    assert rental["state"] == "live"
