"""What the chart runs beside the controller: the proof of an installation, and the guard before it goes."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from aiohttp import web
from pytest_postgresql.executors import NoopExecutor

from app.api import keys
from app.kube.client import Obj
from app.store.devserver import DevPostgres
from hack.cluster import Cluster
from tests.cluster.kube.scripted import ScriptedServer, kubeconfig_for, serving
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


# --- what a healthy cluster does not say on demand -----------------------------------------------

NO_SUCH_KIND = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "404 page not found"}


def listed(*items: Obj) -> web.Response:
    return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})


async def asked(server: ScriptedServer, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")}
    line = ["uninstall", "check", "--kubeconfig", str(kubeconfig_for(server, folder)), *argv]
    command = [sys.executable, "-m", "app.cli", *line]
    return await asyncio.to_thread(
        subprocess.run, command, env=clean, capture_output=True, text=True, check=False, timeout=60
    )


async def test_where_the_cluster_serves_no_kind_of_ours_nothing_is_rented(tmp_path: Path) -> None:
    others = web.json_response({"kind": "APIGroupList", "groups": [{"name": "apps"}]})
    async with serving() as server:
        server.refusals += [web.json_response(NO_SUCH_KIND, status=404), others]
        done = await asked(server, tmp_path)

    assert (done.returncode, done.stdout) == (0, "nothing is rented\n"), done.stderr


async def test_a_404_of_what_may_be_no_api_server_does_not_say_that_nothing_is_rented(tmp_path: Path) -> None:
    ours = web.json_response({"kind": "APIGroupList", "groups": [{"name": keys.GROUP}]})
    for second in (web.json_response(NO_SUCH_KIND, status=404), ours):
        async with serving() as server:
            server.refusals += [web.json_response(NO_SUCH_KIND, status=404), second]
            done = await asked(server, tmp_path)

        assert done.returncode == 1
        assert "nothing is rented" not in done.stdout


async def test_a_pool_that_somebody_changes_meanwhile_is_let_go_all_the_same(tmp_path: Path) -> None:
    pool = {"metadata": {"name": "one", "resourceVersion": "7", "finalizers": ["x/y", keys.POOL_FINALIZER]}}
    changed = {"kind": "Status", "code": 409, "reason": "Conflict", "message": "the object has been modified"}
    async with serving() as server:
        server.refusals += [listed(), web.json_response({}), web.json_response({})]
        server.refusals += [listed(pool), web.json_response(changed, status=409)]
        server.refusals += [listed(pool), web.json_response(pool), listed()]
        done = await asked(server, tmp_path, "--clean-up")
        patches = [json.loads(each.body) for each in server.requests if each.method == "PATCH"]

    assert done.returncode == 0, done.stderr
    assert "let go nodepool one" in done.stdout
    assert patches == [{"metadata": {"resourceVersion": "7", "finalizers": ["x/y"]}}] * 2
    assert not server.refusals


async def test_whatever_fails_after_the_controller_was_stopped_starts_it_again(tmp_path: Path) -> None:
    scale, forbidden = {"spec": {"replicas": 2}}, {"kind": "Status", "code": 403, "reason": "Forbidden"}
    async with serving() as server:
        server.refusals += [listed(), web.json_response(scale), web.json_response(scale)]
        server.refusals += [web.json_response({"spec": {"selector": {"matchLabels": {"a": "b"}}}})]
        server.refusals += [listed(), listed(), web.json_response(forbidden, status=403)]
        done = await asked(server, tmp_path, "--deployment", "nebula", "--clean-up")
        sent = [(each.method, each.path, each.body) for each in server.requests]

    assert done.returncode == 1
    assert [json.loads(body) for method, _, body in sent if method == "PATCH"] == [
        {"spec": {"replicas": 0}},
        {"spec": {"replicas": 2}},
    ]
    assert sent[-1][1].endswith("/deployments/nebula/scale")
