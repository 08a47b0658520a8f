"""Reviews over HTTP: what cannot be understood is an error, never an "allowed"."""

import base64
import json

import pytest
import structlog
from admission_makers import GATE, a_stock, opted_in

from app.admission.configurations import certificate_names, configurations
from app.admission.reviews import BODY_BYTES_MAX, application
from app.api import keys

SECRET = "hunter2-in-the-environment"


def a_review(obj, *, kind="Pod", group="", operation="CREATE", **request):
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"group": group, "version": "v1", "kind": kind},
            "operation": operation,
            "namespace": "default",
            "object": obj,
            **request,
        },
    }


async def posted(body, *, path=keys.POD_MUTATING_PATH, method="POST"):
    """Status and body of the answer to one request, in chunks as a server delivers it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    step = 1024 * 1024
    chunks = [raw[at : at + step] for at in range(0, len(raw), step)] or [b""]
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": at < len(chunks) - 1}
        for at, chunk in enumerate(chunks)
    ]
    sent = []

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "server": ("127.0.0.1", 9443),
    }
    await application(stock=a_stock("aws"))(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def answered(body, *, path=keys.POD_MUTATING_PATH):
    status, text = await posted(body, path=path)
    assert status == 200, text
    answer = json.loads(text)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answer["response"]["uid"] == "u-1"
    return answer["response"]


async def test_a_mutation_is_a_json_patch():
    response = await answered(a_review(opted_in()))

    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    patch = json.loads(base64.b64decode(response["patch"]))
    assert {"op": "add", "path": "/spec/schedulingGates", "value": [GATE]} in patch


async def test_a_refusal_carries_every_reason_and_no_patch():
    response = await answered(a_review(opted_in(nodeName="n", gpus="8")))

    assert response["allowed"] is False
    assert response["status"]["code"] == 403
    assert "spec.nodeName" in response["status"]["message"]
    assert "without a type" in response["status"]["message"]
    assert "patch" not in response


@pytest.mark.behaviour(10)
async def test_10_an_update_is_left_alone():
    response = await answered(a_review(opted_in(), operation="UPDATE"))

    assert response == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize("subresource", ["ephemeralcontainers", "resize"])
async def test_a_subresource_is_refused_by_the_validating_webhook(subresource):
    review = a_review(opted_in(), operation="UPDATE", subResource=subresource)

    assert (await answered(review, path=keys.POD_VALIDATING_PATH))["allowed"] is False


async def test_a_pool_with_an_unknown_provider_is_allowed_with_a_warning():
    pool = {"metadata": {"name": "gpu"}, "spec": {"providers": [{"name": "modal"}]}}
    review = a_review(pool, kind="NodePool", group=keys.GROUP)

    response = await answered(review, path=keys.NODE_POOL_VALIDATING_PATH)

    assert response["allowed"] is True
    assert "modal" in response["warnings"][0]


BAD = {
    "not-json": b"{",
    "empty": b"",
    "a-list": [],
    "another-kind-of-body": {"apiVersion": "v1", "kind": "Pod"},
    "no-uid": a_review(opted_in()) | {"request": {"kind": {"group": "", "kind": "Pod"}}},
    "an-old-version": a_review(opted_in()) | {"apiVersion": "admission.k8s.io/v1beta1"},
    "09-not-a-pod": a_review(opted_in(), kind="Node"),
    "no-object": a_review(None),
    "no-metadata": a_review({"spec": {}}),
    "no-spec": a_review({"metadata": {}}),
}


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("name", BAD)
async def test_a_review_that_cannot_be_understood_is_an_error_with_a_message(name):
    status, text = await posted(BAD[name])

    assert status == 400
    assert text.strip()


async def test_a_body_larger_than_any_object_is_an_error():
    status, _ = await posted(b" " * (BODY_BYTES_MAX + 1))

    assert status == 413


async def test_a_body_as_large_as_the_limit_is_read():
    text = json.dumps(a_review(opted_in())).encode()

    assert (await answered(text + b" " * (BODY_BYTES_MAX - len(text))))["allowed"] is True


@pytest.mark.parametrize(
    "pod",
    [
        opted_in(nodeName="n"),
        opted_in(schedulingGates=[{"unnamed": SECRET}]),
        {"metadata": SECRET, "spec": {}},
    ],
    ids=["refused", "failed", "not-understood"],
)
async def test_no_value_of_a_pod_reaches_the_log(pod):
    if "containers" in pod["spec"]:
        pod["spec"]["containers"][0]["env"] = [{"name": "TOKEN", "value": SECRET}]

    with structlog.testing.capture_logs() as logs:
        await posted(a_review(pod))

    assert logs
    assert SECRET not in repr(logs)


async def test_a_review_that_fails_is_an_error_and_not_allowed():
    status, _ = await posted(a_review(opted_in(schedulingGates=[{"unnamed": "x"}])))

    assert status == 500


def webhooks_of(**changes):
    given = {"namespace": "gpu-system", "url": None, "service": "hooks", **changes}
    return {hook["name"]: hook for each in configurations(**given) for hook in each["webhooks"]}


@pytest.mark.behaviour(348)
def test_without_a_url_the_webhooks_are_behind_the_service():
    hook = webhooks_of()[keys.POD_MUTATING_WEBHOOK]

    assert hook["clientConfig"] == {
        "service": {"namespace": "gpu-system", "name": "hooks", "path": "/mutate--v1-pod", "port": 443}
    }
    assert certificate_names(namespace="gpu-system", url=None, service="hooks")[0] == "hooks.gpu-system.svc"


def test_with_a_url_each_webhook_has_its_path_below_it():
    urls = {hook["clientConfig"]["url"] for hook in webhooks_of(url="https://10.0.0.1:9443/x/").values()}

    assert urls == {
        "https://10.0.0.1:9443/x/mutate--v1-pod",
        "https://10.0.0.1:9443/x/validate--v1-pod",
        "https://10.0.0.1:9443/x/warn--v1-pod",
        "https://10.0.0.1:9443/x/validate-nebula-inftyai-com-v1alpha1-nodepool",
    }
    assert certificate_names(namespace="n", url="https://10.0.0.1:9443/x/", service="s") == ["10.0.0.1"]


@pytest.mark.behaviour(11, 12)
@pytest.mark.field_case("FC-103")
def test_11_12_only_opted_in_pods_outside_the_system_s_namespaces_are_asked_about():
    for name in (keys.POD_MUTATING_WEBHOOK, keys.POD_VALIDATING_WEBHOOK):
        hook = webhooks_of()[name]
        (namespaces,) = hook["namespaceSelector"]["matchExpressions"]

        assert hook["objectSelector"] == {"matchLabels": {"nebula.inftyai.com/enabled": "true"}}
        assert namespaces["operator"] == "NotIn"
        assert set(namespaces["values"]) == {
            *("kube-system", "kube-node-lease", "kube-public", "nebula-system", "gpu-system")
        }


@pytest.mark.behaviour(13)
def test_13_a_pod_is_refused_without_us_and_a_pool_is_not():
    policies = {name: hook["failurePolicy"] for name, hook in webhooks_of().items()}

    assert policies == {
        keys.POD_MUTATING_WEBHOOK: "Fail",
        keys.POD_VALIDATING_WEBHOOK: "Fail",
        keys.NODE_POOL_VALIDATING_WEBHOOK: "Ignore",
        keys.POD_WARNING_WEBHOOK: "Ignore",
    }
