"""The rendered chart before a real API server: every object is valid, every Pod is restricted."""

import json
from uuid import uuid4

import pytest

from tests.chart.conftest import NAMESPACE, Helm
from tests.chart.test_rendering import ALL, EXTERNAL, pod_templates
from tests.support.cluster import Kubectl

pytestmark = pytest.mark.slow

# Their kinds are the operator's.
EVERYTHING = ALL | {"metrics.serviceMonitor.enabled": False, "metrics.prometheusRule.enabled": False}
WAYS = pytest.mark.parametrize("values", [{}, EVERYTHING, EXTERNAL], ids=["zero", "all", "external"])


@WAYS
def test_the_api_server_takes_every_object(helm: Helm, kubectl: Kubectl, values: dict[str, object]) -> None:
    kubectl.run("create", "namespace", NAMESPACE)
    objects = helm.objects(values)

    kubectl("wait", "--for=create", "serviceaccount/default", "-n", NAMESPACE, "--timeout=30s")
    for each in objects:
        if each["kind"] == "Pod":  # whose account a dry run did not make
            each["spec"]["serviceAccountName"] = "default"
        kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(each))


@WAYS
def test_a_namespace_that_enforces_restricted_takes_every_pod(
    helm: Helm, kubectl: Kubectl, values: dict[str, object]
) -> None:
    name = f"restricted-{uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")

    for owner, spec in pod_templates(helm.objects(values)):
        # What a StatefulSet adds: a volume for each claim template.
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        missing = mounted - {volume["name"] for volume in spec["volumes"]}
        spec["volumes"] += [{"name": each, "emptyDir": {}} for each in sorted(missing)]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": owner, "namespace": name},
            "spec": spec | {"serviceAccountName": "default", "restartPolicy": "Never"},
        }
        kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    kubectl("delete", "namespace", name, "--wait=false")
