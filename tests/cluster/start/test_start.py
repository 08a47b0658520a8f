"""What keeps a replica from starting: one clear error, before anything is served."""

import asyncio
import copy
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from app.api import keys
from app.cli import main
from app.kube.client import Kube
from app.kube.preflight import missing_kinds, rights
from hack.cluster import Cluster
from hack.controller import Controller
from hack.e2e import rights as audit
from tests.cluster.kube.scripted import kubeconfig_for, serving
from tests.cluster.kube.waiting import until
from tests.cluster.start.conftest import Account
from tests.support.clouds import SMALL, FakeCloud
from tests.support.cluster import Kubectl

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "one",
        "labels": {keys.ENABLED_LABEL: keys.ENABLED, keys.NODE_POOL_LABEL: "start"},
    },
    "spec": {"containers": [{"name": "main", "image": "app:1"}]},
}


def refused(*args: str, kubeconfig: Path | str, **env: str) -> tuple[int, str]:
    """Exit code and output of a ``nebula run`` that ends by itself, in a thread: it has a loop of its own."""
    clean = {key: None for key in os.environ if key.startswith(("NEBULA_", "KUBE"))}
    options = {
        "NEBULA_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "NEBULA_PROVIDERS": "fake=fake,url=http://127.0.0.1:1",
        "NEBULA_WEBHOOK_BIND": "127.0.0.1:0",
        "NEBULA_HEALTH_BIND": "127.0.0.1:0",
        "KUBECONFIG": str(kubeconfig),
    }
    runner = CliRunner(env=clean | options | env)
    with ThreadPoolExecutor(max_workers=1) as thread:
        result = thread.submit(runner.invoke, main, ["run", *args]).result()
    return result.exit_code, result.output


UNUSABLE = {
    "absent": (None, "no kubeconfig at"),
    "not-yaml": ("{", "cannot use the configuration of"),
    "no-cluster": ("apiVersion: v1\nkind: Config\ncurrent-context: x\n", "cannot use the configuration of"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_kubeconfig_that_cannot_be_used_is_one_error_that_names_it(tmp_path: Path, name: str):
    content, words = UNUSABLE[name]
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)

    code, said = refused(kubeconfig=path)

    assert code == 1
    assert f"Error: --kubeconfig: {words}" in said
    assert str(path) in said


def test_an_api_server_that_does_not_answer_is_one_error(cluster: Cluster, tmp_path: Path):
    nowhere = tmp_path / "kubeconfig"
    nowhere.write_text(
        json.dumps(
            {
                "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:1"}}],
                "contexts": [{"name": "a", "context": {"cluster": "a"}}],
                "current-context": "a",
            }
        )
    )

    code, said = refused(kubeconfig=nowhere)

    assert code == 1
    assert "Error: the API server at http://127.0.0.1:1 cannot be used: " in said
    assert "cannot connect to 127.0.0.1:1: Connection refused; does --kubeconfig (KUBECONFIG)" in said


def test_every_right_that_is_missing_is_named(account: Account, our_kinds: None, system: str):
    granted = [
        replace(right, verbs=tuple(verb for verb in right.verbs if verb != "delete"))
        for right in rights(system)
        if right.resource != "nodes/status"
    ]

    code, said = refused("--namespace", system, kubeconfig=account(granted))

    assert code == 1
    for line in (
        "delete pods cluster-wide",
        "patch nodes/status cluster-wide",
        f"delete nodeclaims.{keys.GROUP} cluster-wide",
    ):
        assert f"\n  {line}\n" in said + "\n"
    assert "get" not in said.partition("rights to:")[2]


def test_a_namespace_that_does_not_exist_is_named_with_its_option(cluster: Cluster, our_kinds: None):
    code, said = refused("--namespace", "nowhere", kubeconfig=cluster.kubeconfig)

    assert code == 1
    assert "namespace nowhere does not exist: create it, or give --namespace" in said


@pytest.mark.behaviour(272)
def test_an_endpoint_that_could_know_nobody_ends_the_start(
    cluster: Cluster, our_kinds: None, system: str, tmp_path: Path
):
    empty = tmp_path / "ca.pem"
    empty.write_text("no certificate")
    for file, words in ((tmp_path / "none.pem", "No such file"), (empty, "holds no certificate")):
        code, said = refused(
            *("--namespace", system, "--kubelet-address", "127.0.0.1", "--kubelet-bind", "127.0.0.1:0"),
            *("--kubelet-client-ca-file", str(file)),
            kubeconfig=cluster.kubeconfig,
        )

        assert code == 1
        assert words in said
        assert "--kubelet-client-ca-file" in said


def test_options_that_an_adapter_refuses_end_the_start(
    cluster: Cluster, our_kinds: None, system: str, tmp_path: Path
):
    controller = Controller(
        tmp_path / "controller",
        kubeconfig=cluster.kubeconfig,
        database_url="postgresql://nobody@127.0.0.1:1/none",
        clouds={},
        options={"NEBULA_NAMESPACE": system, "NEBULA_PROVIDERS": "fake=fake,urll=http://127.0.0.1:1"},
    )

    controller.start(wait=False)

    assert controller.await_end() == 2
    assert "Error: --providers: fake/default: fake: no such option: urll" in controller.log.read_text()


async def test_kinds_that_the_cluster_does_not_serve_are_named(tmp_path: Path):
    absent = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "no such group"}
    async with serving() as server:
        server.refusals.append(web.json_response(absent, status=404))
        async with await Kube.connect(kubeconfig=str(kubeconfig_for(server, tmp_path))) as kube:
            missing = await missing_kinds(kube)

    assert missing == [f"{kind}.{keys.GROUP}" for kind in ("nodepools", "nodeclaims", "cloudpodbindings")]


@pytest.mark.field_case("FC-105")
async def test_the_rights_that_are_asked_for_are_enough(
    account,
    cluster: Cluster,
    kubectl: Kubectl,
    our_kinds: None,
    system: str,
    database_url: str,
    tmp_path: Path,
):
    """A controller that has these and no others takes a Pod from its creation to its end."""
    async with FakeCloud.running(tmp_path / "cloud", scenario=SMALL) as cloud:
        controller = Controller(
            tmp_path / "controller",
            kubeconfig=account(rights(system)),
            database_url=database_url,
            clouds={"start": cloud.url},
            webhook_url=cluster.webhook_url,
            options={"NEBULA_NAMESPACE": system},
        )
        pool = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_POOL,
            "metadata": {"name": "start"},
            "spec": {"providers": [{"name": "start"}]},
        }
        try:
            await asyncio.to_thread(controller.start)
            await asyncio.to_thread(kubectl, "create", "-f", "-", stdin=json.dumps(pool))
            user = f"{system}-user"
            await asyncio.to_thread(kubectl, "create", "namespace", user)
            await asyncio.to_thread(kubectl, "create", "-n", user, "-f", "-", stdin=json.dumps(POD))
            args = ("wait", "pod/one", "-n", user, "--for=condition=Ready", "--timeout=60s")
            await asyncio.to_thread(kubectl, *args, timeout_s=70)
            assert len(await cloud.alive()) == 1
            lease = ("wait", "lease/nebula-start", "-n", "kube-node-lease", "--for=create", "--timeout=30s")
            await asyncio.to_thread(kubectl, *lease, timeout_s=40)  # later than a short-lived Pod

            await asyncio.to_thread(kubectl, "delete", "pod", "one", "-n", user)
            claims = (
                "wait",
                "nodeclaims",
                "-l",
                f"{keys.NODE_POOL_LABEL}=start",
                "--for=delete",
                "--timeout=60s",
            )
            await asyncio.to_thread(kubectl, *claims, timeout_s=70)

            assert await cloud.alive() == []
            assert '"status":403' not in controller.log.read_text().replace(" ", "")
            assert "Forbidden" not in controller.log.read_text()
            if cluster.control_plane is not None:  # else the audit log is somebody's own
                given = frozenset(
                    audit.Right(right.namespace or "", right.group, right.resource, verb)
                    for right in rights(system)
                    for verb in right.verbs
                )
                found = await asyncio.to_thread(
                    audit.used,
                    cluster.control_plane.audit_log,
                    account=f"system:serviceaccount:{system}:{system}",
                    given=given,
                )
                assert found.forbidden == ()  # `make e2e` also fails on any that nothing ever used
        finally:
            await asyncio.to_thread(controller.stop)
            for kind, name in (
                ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
                ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
                ("nodepool", "start"),
                ("node", "nebula-start"),
                ("namespace", f"{system}-user"),
            ):
                await asyncio.to_thread(
                    kubectl.run, "delete", kind, name, "--ignore-not-found", "--wait=false"
                )


@pytest.mark.field_case("FC-121")
async def test_a_replica_that_does_not_lead_knows_what_is_sold_and_lists_no_machines(
    cluster: Cluster, kubectl: Kubectl, our_kinds: None, system: str, database_url: str, tmp_path: Path
):
    """Every replica answers admission. The follower's cloud is another one, and is asked for offers only."""
    async with (
        FakeCloud.running(tmp_path / "one", scenario=SMALL) as leaders,
        FakeCloud.running(tmp_path / "two", scenario=SMALL) as followers,
    ):
        lease = {"NEBULA_LEASE_DURATION_S": "20", "NEBULA_LEASE_DEADLINE_S": "15"}
        first, second = (
            Controller(
                tmp_path / name,
                kubeconfig=cluster.kubeconfig,
                database_url=database_url,
                clouds={"start": cloud.url},
                options={"NEBULA_NAMESPACE": system, **lease},
            )
            for name, cloud in (("first", leaders), ("second", followers))
        )
        try:
            await asyncio.to_thread(first.start)
            await until(lambda: "leading" in first.log.read_text())
            await asyncio.to_thread(second.start)
            await until(lambda: "offers changed" in second.log.read_text())

            said = await _answer_of(second, accelerator="h10")

            assert said["allowed"] is False
            assert "did you mean H100" in said["status"]["message"]
            assert (await _answer_of(second, accelerator="h100"))["allowed"] is True
            assert "leading" not in second.log.read_text()
            calls = (await followers.truth())["calls"]
            assert calls["offers"] >= 1
            assert calls.get("list", 0) == 0
        finally:
            for controller in (first, second):
                await asyncio.to_thread(controller.stop)
            for kind, name in (
                ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
                ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
                ("node", "nebula-start"),
            ):
                await asyncio.to_thread(
                    kubectl.run, "delete", kind, name, "--ignore-not-found", "--wait=false"
                )


async def _answer_of(controller: Controller, *, accelerator: str) -> dict[str, Any]:
    """What this replica's own webhook says of a Pod."""
    pod = copy.deepcopy(POD)
    pod["metadata"]["labels"][keys.ACCELERATOR_TYPE_LABEL] = accelerator
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "operation": "CREATE",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "object": pod,
        },
    }
    url = f"https://{controller.webhook_address}{keys.POD_MUTATING_PATH}"
    async with aiohttp.ClientSession() as session, session.post(url, json=review, ssl=False) as answer:
        response: dict[str, Any] = (await answer.json())["response"]
        return response
