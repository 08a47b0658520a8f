"""The two webhook configurations, as we keep them; the CA bundle is added by whoever applies them.

The API server calls us for opted-in Pods only, and never for those of its own namespaces or ours: nothing
else in the cluster depends on us being there. An opted-in Pod does: without us it is refused rather than let
through without a gate. A Pod that carries a label of ours and is not opted in is shown to us as well, for a
warning that it may have been meant to be; it is created whether or not we answer.
"""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from app.api.keys import (
    ENABLED,
    ENABLED_LABEL,
    GROUP,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MUTATING_WEBHOOK_CONFIGURATION,
    NODE_POOL_VALIDATING_PATH,
    NODE_POOL_VALIDATING_WEBHOOK,
    NODE_POOLS,
    POD_MUTATING_PATH,
    POD_MUTATING_WEBHOOK,
    POD_VALIDATING_PATH,
    POD_VALIDATING_WEBHOOK,
    POD_WARNING_PATH,
    POD_WARNING_WEBHOOK,
    UNMANAGED_NAMESPACES,
    VALIDATING_WEBHOOK_CONFIGURATION,
    VERSION,
)

Obj = dict[str, Any]

PORT: Final = 443  # of the Service
POD_TIMEOUT_S: Final = 10
WARNING_TIMEOUT_S: Final = 3  # for an answer that can only warn
BYSTANDER_TIMEOUT_S: Final = 1  # the same, about Pods that are none of our business

# The API server's own look at a Pod's labels; what it does not match costs no call. Those that have decided
# are left to the selector: the expression for each opted-in Pod was a twentieth of the API server's work.
_PRODUCT, _DOMAIN, _ = GROUP.split(".")
_UNDECIDED: Final = {
    "matchExpressions": [{"key": ENABLED_LABEL, "operator": "NotIn", "values": [ENABLED, "false"]}]
}
ALMOST_OPTED_IN: Final = (
    "has(object.metadata.labels) && object.metadata.labels.exists(key,"
    f" key.startsWith('{_PRODUCT}.') || key.contains('{_DOMAIN}.'))"
)


def configurations(*, namespace: str, url: str | None, service: str) -> list[Obj]:
    """Both configurations, for webhooks at ``url`` or, without one, behind the Service in ``namespace``."""

    def client(path: str) -> Obj:
        if url is not None:
            return {"url": url.rstrip("/") + path}
        return {"service": {"namespace": namespace, "name": service, "path": path, "port": PORT}}

    left_alone = sorted({*UNMANAGED_NAMESPACES, namespace})
    about_pods: Obj = {
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": POD_TIMEOUT_S,
        "objectSelector": {"matchLabels": {ENABLED_LABEL: ENABLED}},
        "namespaceSelector": {
            "matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": left_alone}
            ]
        },
    }
    mutating = about_pods | {
        "name": POD_MUTATING_WEBHOOK,
        "clientConfig": client(POD_MUTATING_PATH),
        "reinvocationPolicy": "IfNeeded",
        "rules": [_rule("", "v1", ["pods"], operations=["CREATE"], scope="Namespaced")],
    }
    validating = about_pods | {
        "name": POD_VALIDATING_WEBHOOK,
        "clientConfig": client(POD_VALIDATING_PATH),
        "rules": [
            _rule("", "v1", ["pods"], operations=["CREATE"], scope="Namespaced"),
            _rule(
                "",
                "v1",
                ["pods/ephemeralcontainers", "pods/resize"],
                operations=["UPDATE"],
                scope="Namespaced",
            ),
        ],
    }
    warning_of_bystanders: Obj = {
        "name": POD_WARNING_WEBHOOK,
        "clientConfig": client(POD_WARNING_PATH),
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": BYSTANDER_TIMEOUT_S,
        "namespaceSelector": about_pods["namespaceSelector"],
        "objectSelector": _UNDECIDED,
        "matchConditions": [{"name": "almost-opted-in", "expression": ALMOST_OPTED_IN}],
        "rules": [_rule("", "v1", ["pods"], operations=["CREATE"], scope="Namespaced")],
    }
    warning_of_pools: Obj = {
        "name": NODE_POOL_VALIDATING_WEBHOOK,
        "clientConfig": client(NODE_POOL_VALIDATING_PATH),
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": WARNING_TIMEOUT_S,
        "rules": [_rule(GROUP, VERSION, [NODE_POOLS], operations=["CREATE", "UPDATE"], scope="Cluster")],
    }
    return [
        _configuration("MutatingWebhookConfiguration", MUTATING_WEBHOOK_CONFIGURATION, [mutating]),
        _configuration(
            "ValidatingWebhookConfiguration",
            VALIDATING_WEBHOOK_CONFIGURATION,
            [validating, warning_of_pools, warning_of_bystanders],
        ),
    ]


def certificate_names(*, namespace: str, url: str | None, service: str) -> list[str]:
    """The names that the API server calls us by, the first one being the one it uses.

    Raises:
        ValueError: the URL names no host.
    """
    if url is None:
        return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]
    host = urlsplit(url).hostname
    if not host:
        raise ValueError(f"no host in the webhooks' URL {url!r}")
    return [host]


def with_port(url: str, port: int) -> str:
    """``url`` with ``port`` where it says port 0, which nobody can mean; any other as it is."""
    parts = urlsplit(url)
    if parts.port != 0:
        return url
    return parts._replace(netloc=f"{parts.netloc.removesuffix(':0')}:{port}").geturl()


def _rule(
    group: str, version: str, resources: Sequence[str], *, operations: Sequence[str], scope: str
) -> Obj:
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": list(resources),
        "operations": list(operations),
        "scope": scope,
    }


def _configuration(kind: str, name: str, webhooks: Sequence[Obj]) -> Obj:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": {MANAGED_BY_LABEL: MANAGED_BY}},
        "webhooks": list(webhooks),
    }
