"""What a replica needs of the cluster before it starts: our kinds, and the right to do what it does.

Asked once, so that a missing CRD or permission is one clear error and not a Pod that stays gated for ever.
Where the cluster cannot list a user's rights whole (it asks a webhook), nothing is concluded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from app.api.keys import (
    API_VERSION,
    CLOUD_POD_BINDINGS,
    GROUP,
    MUTATING_WEBHOOK_CONFIGURATION,
    NODE_CLAIMS,
    NODE_POOLS,
    VALIDATING_WEBHOOK_CONFIGURATION,
)
from app.kube.client import Kube
from app.kube.errors import KubeError

log = structlog.get_logger()

_RULES_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
_HOOKS = "admissionregistration.k8s.io"
_LEASES_OF_NODES = "kube-node-lease"
_NOWHERE = "nebula-no-such-namespace"  # what may be done there may be done everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs on one resource. ``namespace`` None: in every one, or the resource has none.

    ``name``: on the object of that name alone; None: on every one.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    namespace: str | None = None
    name: str | None = None


def rights(namespace: str) -> tuple[Right, ...]:
    """Everything that a replica does, with its own objects in ``namespace``. The chart grants the same."""
    own = {"namespace": namespace}
    every = (
        ("", "pods", "get list watch patch delete"),
        ("", "pods/status", "patch"),
        ("", "nodes", "list watch create patch delete"),
        ("", "nodes/status", "patch"),
        ("", "events", "create patch"),
        ("", "namespaces", "get list watch"),
        ("", "configmaps", "get"),
        ("", "secrets", "get"),
        (GROUP, NODE_POOLS, "get list watch patch"),
        (GROUP, f"{NODE_POOLS}/status", "patch"),
        (GROUP, NODE_CLAIMS, "get list watch create patch delete"),
        (GROUP, f"{NODE_CLAIMS}/status", "patch"),
        (GROUP, CLOUD_POD_BINDINGS, "get list watch create delete"),
        (GROUP, f"{CLOUD_POD_BINDINGS}/status", "patch"),
        ("authentication.k8s.io", "tokenreviews", "create"),
        ("authorization.k8s.io", "subjectaccessreviews", "create"),
        (_HOOKS, "mutatingwebhookconfigurations", "create"),  # what is made has no name to be allowed by
        (_HOOKS, "validatingwebhookconfigurations", "create"),
    )
    ours = (
        ("mutatingwebhookconfigurations", MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfigurations", VALIDATING_WEBHOOK_CONFIGURATION),
    )
    return (
        *(Right(group=group, resource=name, verbs=tuple(verbs.split())) for group, name, verbs in every),
        *(Right(group=_HOOKS, resource=kind, verbs=("get", "patch"), name=name) for kind, name in ours),
        Right(group="", resource="secrets", verbs=("get", "create", "update"), **own),
        Right(group="coordination.k8s.io", resource="leases", verbs=("get", "create", "update"), **own),
        Right(
            group="coordination.k8s.io",
            resource="leases",
            verbs=("create", "patch", "delete"),  # delete: where owner references need it
            namespace=_LEASES_OF_NODES,
        ),
    )


async def missing_kinds(kube: Kube) -> list[str]:
    """Our kinds that the cluster does not serve, as ``nodepools.nebula.inftyai.com``.

    Raises:
        KubeError: the cluster could not be asked.
    """
    try:
        served = await kube.get(f"/apis/{API_VERSION}")
    except KubeError as error:
        if error.status != 404:
            raise
        served = {}
    names = {each["name"] for each in served.get("resources") or ()}
    return [f"{name}.{GROUP}" for name in (NODE_POOLS, NODE_CLAIMS, CLOUD_POD_BINDINGS) if name not in names]


async def missing_rights(kube: Kube, *, namespace: str) -> list[str]:
    """What we may not do, one line for each resource; empty also when the cluster does not tell.

    Raises:
        Unreachable: there was no answer.
    """
    wanted = rights(namespace)
    granted: dict[str | None, list[Mapping[str, Any]]] = {}
    for where in dict.fromkeys(right.namespace for right in wanted):
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": where or _NOWHERE},
        }
        try:
            status = (await kube.create(_RULES_REVIEW, body)).get("status") or {}
        except KubeError as error:
            if error.status == 0:
                raise
            log.info("permissions not checked", error=str(error))
            return []
        if status.get("incomplete"):
            log.info("permissions not checked", error=str(status.get("evaluationError") or "")[:256])
            return []
        granted[where] = status.get("resourceRules") or []
    return [line for right in wanted if (line := _lacking(right, granted[right.namespace]))]


def _lacking(right: Right, rules: Iterable[Mapping[str, Any]]) -> str | None:
    lacking = [verb for verb in right.verbs if not any(_allows(rule, right, verb) for rule in rules)]
    if not lacking:
        return None
    name = f"{right.resource}.{right.group}" if right.group else right.resource
    if right.name is not None:
        name += f" named {right.name}"
    where = f"in namespace {right.namespace}" if right.namespace else "cluster-wide"
    return f"{', '.join(lacking)} {name} {where}"


def _allows(rule: Mapping[str, Any], right: Right, verb: str) -> bool:
    """A rule for single names counts only for what we need of one of them."""
    subresource = right.resource.partition("/")[2]
    names = {"*", right.resource, *({f"*/{subresource}"} if subresource else ())}
    return (
        (not rule.get("resourceNames") or right.name in rule["resourceNames"])
        and bool({"*", verb} & set(rule.get("verbs") or ()))
        and bool({"*", right.group} & set(rule.get("apiGroups") or ()))
        and bool(names & set(rule.get("resources") or ()))
    )
