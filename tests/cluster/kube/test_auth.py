"""Credentials on a real API server: a ServiceAccount's, and certificates that change under way."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from app.kube import auth, paths, pki
from app.kube.client import Kube
from app.kube.errors import KubeError

WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


async def who(kube: Kube) -> str:
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    name: str = (await kube.create(WHO, review))["status"]["userInfo"]["username"]
    return name


async def a_token(kube: Kube, namespace: str, account: str) -> str:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await kube.create(path, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token: str = (await kube.create(f"{path}/{account}/token", request))["status"]["token"]
    return token


def server_of(kubeconfig: Path) -> tuple[str, bytes]:
    """Address and CA of a kubeconfig's current cluster."""
    cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
    if "certificate-authority-data" in cluster:
        return cluster["server"], base64.b64decode(cluster["certificate-authority-data"])
    return cluster["server"], kubeconfig.parent.joinpath(cluster["certificate-authority"]).read_bytes()


@pytest.fixture
def pod_folder(cluster, tmp_path, monkeypatch) -> Path:
    """What a kubelet mounts into a Pod, with the token still to be written."""
    server, ca = server_of(cluster.kubeconfig)
    host, port = server.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (tmp_path / "ca.crt").write_bytes(ca)
    return tmp_path


async def in_pod(folder: Path, *, reread_s: float = auth.REREAD_S) -> auth.Connection:
    source = auth._InCluster(folder)
    return auth.Connection(source, await source.load(afresh=True), reread_s=reread_s)


@pytest.mark.field_case("FC-043")
async def test_in_a_pod_the_service_account_is_used_and_its_rotated_token_is_read(
    kube, namespace, pod_folder
):
    (pod_folder / "token").write_text(await a_token(kube, namespace, "one") + "\n")
    async with Kube(await in_pod(pod_folder, reread_s=0.0)) as inside:
        assert await who(inside) == f"system:serviceaccount:{namespace}:one"

        (pod_folder / "token").write_text(await a_token(kube, namespace, "two"))
        assert await who(inside) == f"system:serviceaccount:{namespace}:two"


@pytest.mark.field_case("FC-043")
async def test_a_token_that_the_server_refuses_is_read_again_within_the_same_request(
    kube, namespace, pod_folder
):
    (pod_folder / "token").write_text("not.a.token")
    async with Kube(await in_pod(pod_folder)) as inside:
        (pod_folder / "token").write_text(await a_token(kube, namespace, "one"))

        assert await who(inside) == f"system:serviceaccount:{namespace}:one"


async def test_a_token_that_stays_refused_is_reported(pod_folder):
    (pod_folder / "token").write_text("not.a.token")
    async with Kube(await in_pod(pod_folder)) as inside:
        with pytest.raises(KubeError) as caught:
            await who(inside)

    assert caught.value.status == 401
    assert "not.a.token" not in str(caught.value)


async def test_a_changed_ca_is_trusted_by_new_connections(kube, namespace, pod_folder, proxy, monkeypatch):
    """Nothing but the file changes: the session goes on."""
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(proxy.port))
    right = (pod_folder / "ca.crt").read_bytes()
    (pod_folder / "token").write_text(await a_token(kube, namespace, "one"))
    wrong = pki.mint_ca(now=datetime.now(UTC), life=timedelta(days=1)).certificate
    (pod_folder / "ca.crt").write_bytes(wrong)
    async with Kube(await in_pod(pod_folder, reread_s=0.0)) as inside:
        with pytest.raises(KubeError, match=r"(?i)certificate"):
            await who(inside)

        (pod_folder / "ca.crt").write_bytes(right)
        assert await who(inside) == f"system:serviceaccount:{namespace}:one"

        (pod_folder / "ca.crt").write_bytes(wrong)
        await proxy.cut()
        with pytest.raises(KubeError, match=r"(?i)certificate"):
            await who(inside)


async def test_requests_go_on_while_every_connection_is_cut(through, proxy, namespace):
    for _ in range(3):
        assert await through.find(paths.namespace(namespace)) is not None
        await proxy.cut()
