"""Accounts of the cluster with chosen rights, each with a kubeconfig of its own."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from app.api.crds import load_crds
from app.kube.preflight import Right
from hack.cluster import Cluster
from tests.support.cluster import Kubectl

Account = Callable[[Iterable[Right]], Path]
"""Makes a ServiceAccount with exactly these rights; the kubeconfig that speaks as it."""


@pytest.fixture
def system(kubectl: Kubectl) -> Iterator[str]:
    """The namespace of a controller that this test alone runs."""
    name = f"start-{uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def our_kinds(kubectl: Kubectl) -> None:
    for crd in load_crds():
        kubectl("apply", "-f", "-", stdin=json.dumps(crd))
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")


@pytest.fixture
def account(cluster: Cluster, kubectl: Kubectl, system: str, tmp_path: Path) -> Iterator[Account]:
    made: list[tuple[str, ...]] = []

    def make(rights: Iterable[Right]) -> Path:
        kubectl("create", "serviceaccount", system, "-n", system)
        for number, (namespace, rules) in enumerate(_by_namespace(rights).items()):
            name, kind = f"{system}-{number}", "Role" if namespace else "ClusterRole"
            metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
            group = "rbac.authorization.k8s.io"
            role = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": rules}
            binding = {
                "apiVersion": f"{group}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": kind, "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": system, "namespace": system}],
            }
            for obj in (role, binding):
                kubectl("create", "-f", "-", stdin=json.dumps(obj))
                where = ("-n", namespace) if namespace else ()
                made.append((obj["kind"], name, *where))
        return _kubeconfig(cluster, token=kubectl("create", "token", system, "-n", system), folder=tmp_path)

    yield make
    for kind, name, *where in made:
        kubectl("delete", kind.lower(), name, *where)


def _by_namespace(rights: Iterable[Right]) -> dict[str | None, list[dict[str, list[str]]]]:
    rules: dict[str | None, list[dict[str, list[str]]]] = {}
    for right in rights:
        rule = {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
        if right.name is not None:
            rule["resourceNames"] = [right.name]
        rules.setdefault(right.namespace, []).append(rule)
    return rules


def _kubeconfig(cluster: Cluster, *, token: str, folder: Path) -> Path:
    """The cluster's own kubeconfig, as another user."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": "limited", "user": {"token": token.strip()}}]
    for context in config["contexts"]:
        context["context"]["user"] = "limited"
    written = folder / "limited.kubeconfig"
    written.write_text(yaml.safe_dump(config))
    return written
