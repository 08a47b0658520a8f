"""What the chart runs beside the controller: the proof of an installation, and the guard before it goes."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

import asyncpg
import pytest
from pytest_postgresql.executors import NoopExecutor

from app.api import keys
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from tests.cluster.whole.conftest import running
from tests.cluster.whole.owners_world import Owners
from tests.support import postgres
from tests.support.cluster import Kubectl

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Installed:
    """A controller with its clouds, and the commands as they run in a Pod of the chart."""

    owners: Owners
    variables: dict[str, str]

    async def nebula(self, *argv: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")}
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "app.cli", *argv],
            env=clean | self.variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    async def stand_in(self) -> str:
        """A Deployment of this name in our namespace, in the place of the controller's."""
        name = f"controller-{uuid4().hex[:6]}"
        labels = {"app": name}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": keys.SYSTEM_NAMESPACE},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "nodeSelector": {"no": "node"},
                        "containers": [{"name": "c", "image": "none"}],
                    },
                },
            },
        }
        await asyncio.to_thread(self.owners.kubectl_, "create", "-f", "-", stdin=json.dumps(body))
        return name

    async def replicas(self, name: str) -> int:
        shown = await asyncio.to_thread(
            self.owners.kubectl_, "-n", keys.SYSTEM_NAMESPACE, "get", "deployment", name, "-o", "json"
        )
        return int(json.loads(shown)["spec"]["replicas"])


@pytest.fixture
async def installed(
    cluster: Cluster,
    kubectl: Kubectl,
    postgres_server: DevPostgres,
    database_template: NoopExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Installed]:
    with postgres.clone(postgres_server, database_template) as url:
        folder = tmp_path_factory.mktemp("leaving")
        async with running(
            kubectl, folder, kubeconfig=cluster.kubeconfig, database=url, webhook_url=cluster.webhook_url
        ) as owners:
            yield Installed(
                owners, {"NEBULA_KUBECONFIG": str(cluster.kubeconfig), "NEBULA_DATABASE_URL": url}
            )


async def test_the_selftest_runs_a_pod_to_its_end_and_leaves_nothing(installed: Installed) -> None:
    done = await installed.nebula("selftest", "--provider", "once")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"
    assert "Pod: ran to its end on nebula-once" in done.stdout
    assert (await installed.owners.get("nodeclaims"))["items"] == []
    assert not [one for one in await installed.owners.clouds["once"].alive() if not one["phantom"]]


async def test_the_selftest_says_what_is_wrong_without_webhooks(installed: Installed) -> None:
    await asyncio.to_thread(installed.owners.controller.stop)

    done = await installed.nebula("selftest", "--timeout-s", "3")

    assert done.returncode == 1
    assert "admission does not gate an opted-in Pod" in done.stderr


@pytest.mark.field_case("FC-056", "FC-118")
async def test_an_uninstall_is_refused_with_price_and_ways_on_while_something_is_rented(
    installed: Installed,
) -> None:
    owners = installed.owners
    await owners.deployment("serve", "once")
    (pod,) = await owners.ready()
    name = await installed.stand_in()

    done = await installed.nebula("uninstall", "check", "--deployment", name, "--clean-up")

    assert done.returncode == 1
    assert pod["metadata"]["name"] in done.stdout
    assert "USD an hour" in done.stdout
    assert "uninstallPolicy=drain" in done.stderr
    assert await installed.replicas(name) == 2
    assert [one["metadata"]["name"] for one in await owners.ready()] == [pod["metadata"]["name"]]


@pytest.mark.field_case("FC-118")
async def test_a_drain_evicts_and_waits_until_every_machine_is_gone(installed: Installed) -> None:
    owners = installed.owners
    await owners.deployment("serve", "once")
    await owners.ready()
    name = await installed.stand_in()

    done = await installed.nebula(
        "uninstall", "check", "--policy", "drain", "--timeout-s", "60", "--deployment", name
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing is rented"
    assert await owners.alive() == []
    assert await installed.replicas(name) == 0


@pytest.mark.field_case("FC-052")
async def test_abandon_lets_the_machines_live_and_takes_all_of_ours_from_the_cluster(
    installed: Installed,
) -> None:
    owners = installed.owners
    await owners.deployment("serve", "once")
    await owners.ready()
    (machine,) = await owners.alive()
    name = await installed.stand_in()
    await asyncio.to_thread(owners.controller.stop)  # what the Deployment's end would do
    # A database that answers with an error that nobody foresaw: no prices, and no reason to stop half way.
    conn = await asyncpg.connect(installed.variables["NEBULA_DATABASE_URL"].replace("+asyncpg", ""))
    await conn.execute(
        "alter table run rename to kept; "
        "create view run as select claim_uid, gone_at, usd_per_hour / 0 as usd_per_hour from kept"
    )
    await conn.close()

    done = await installed.nebula(
        "uninstall", "check", "--policy", "abandon", "--deployment", name, "--clean-up"
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert machine["id"] in done.stdout
    assert "no prices: DBAPIError" in done.stderr
    assert "nothing is rented" not in done.stdout
    pools = (await owners.get("nodepools"))["items"]
    assert pools
    # Else their kind could not be deleted any more.
    assert not [each for each in pools if keys.POOL_FINALIZER in each["metadata"].get("finalizers", ())]
    assert (await owners.get("nodeclaims"))["items"] == []
    assert [one["id"] for one in await owners.alive()] == [machine["id"]]
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        assert (await owners.get(kind))["items"] == []
    assert (await owners.get("nodes", "-l", f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"))["items"] == []


async def test_abandon_needs_the_controllers_deployment(installed: Installed) -> None:
    done = await installed.nebula("uninstall", "check", "--policy", "abandon")

    assert done.returncode == 2
    assert "a controller that runs would end them" in done.stderr


@pytest.mark.field_case("FC-095")
async def test_the_databases_secret_is_made_once_and_kept(installed: Installed) -> None:
    name = f"db-{uuid4().hex[:6]}"
    first = await installed.nebula("setup", "database-secret", "--name", name)
    made = await installed.owners.get("secret", name, "-n", keys.SYSTEM_NAMESPACE)

    second = await installed.nebula("setup", "database-secret", "--name", name)
    kept = await installed.owners.get("secret", name, "-n", keys.SYSTEM_NAMESPACE)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "unchanged" in second.stdout
    assert made["data"].keys() == {"username", "password"}
    assert kept == made


async def test_the_databases_secret_has_the_keys_that_are_asked_for(installed: Installed) -> None:
    name = f"db-{uuid4().hex[:6]}"
    keys_ = ("--user-key", "user", "--password-key", "pw")

    done = await installed.nebula("setup", "database-secret", "--name", name, *keys_)

    assert done.returncode == 0, done.stderr
    made = await installed.owners.get("secret", name, "-n", keys.SYSTEM_NAMESPACE)
    assert made["data"].keys() == {"user", "pw"}
    lacking = await installed.nebula("setup", "database-secret", "--name", name)
    assert lacking.returncode == 1
    assert "lacks username and password" in lacking.stderr
