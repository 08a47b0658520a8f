"""Where the kinds that we use live below the API server's root.

A collection takes its namespace (None: all of them), an object its name. An empty name is refused: it would
turn a request for one object into one for its whole collection.
"""

from urllib.parse import quote

GROUP = "nebula.inftyai.com"
VERSION = "v1alpha1"


def pods(namespace: str | None = None) -> str:
    return _collection("/api/v1", "pods", namespace)


def pod(namespace: str, name: str) -> str:
    return _object(pods(_needed(namespace)), name)


def pod_status(namespace: str, name: str) -> str:
    return pod(namespace, name) + "/status"


def events(namespace: str | None = None) -> str:
    return _collection("/api/v1", "events", namespace)


def event(namespace: str, name: str) -> str:
    return _object(events(_needed(namespace)), name)


def secrets(namespace: str | None = None) -> str:
    return _collection("/api/v1", "secrets", namespace)


def secret(namespace: str, name: str) -> str:
    return _object(secrets(_needed(namespace)), name)


def configmaps(namespace: str | None = None) -> str:
    return _collection("/api/v1", "configmaps", namespace)


def configmap(namespace: str, name: str) -> str:
    return _object(configmaps(_needed(namespace)), name)


def services(namespace: str | None = None) -> str:
    return _collection("/api/v1", "services", namespace)


def nodes() -> str:
    return "/api/v1/nodes"


def node(name: str) -> str:
    return _object(nodes(), name)


def node_status(name: str) -> str:
    return node(name) + "/status"


def namespaces() -> str:
    return "/api/v1/namespaces"


def namespace(name: str) -> str:
    return _object(namespaces(), name)


def leases(namespace: str | None = None) -> str:
    return _collection("/apis/coordination.k8s.io/v1", "leases", namespace)


def lease(namespace: str, name: str) -> str:
    return _object(leases(_needed(namespace)), name)


def crds() -> str:
    return "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def crd(name: str) -> str:
    return _object(crds(), name)


def mutating_webhooks() -> str:
    return "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def mutating_webhook(name: str) -> str:
    return _object(mutating_webhooks(), name)


def validating_webhooks() -> str:
    return "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def validating_webhook(name: str) -> str:
    return _object(validating_webhooks(), name)


def token_reviews() -> str:
    return "/apis/authentication.k8s.io/v1/tokenreviews"


def subject_access_reviews() -> str:
    return "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def nodepools() -> str:
    return _ours("nodepools")


def nodepool(name: str) -> str:
    return _object(nodepools(), name)


def nodepool_status(name: str) -> str:
    return nodepool(name) + "/status"


def nodeclaims() -> str:
    return _ours("nodeclaims")


def nodeclaim(name: str) -> str:
    return _object(nodeclaims(), name)


def nodeclaim_status(name: str) -> str:
    return nodeclaim(name) + "/status"


def cloudpodbindings(namespace: str | None = None) -> str:
    return _ours("cloudpodbindings", namespace)


def cloudpodbinding(namespace: str, name: str) -> str:
    return _object(cloudpodbindings(_needed(namespace)), name)


def cloudpodbinding_status(namespace: str, name: str) -> str:
    return cloudpodbinding(namespace, name) + "/status"


def _ours(plural: str, namespace: str | None = None) -> str:
    return _collection(f"/apis/{GROUP}/{VERSION}", plural, namespace)


def _collection(root: str, plural: str, namespace: str | None) -> str:
    if namespace is None:
        return f"{root}/{plural}"
    return f"{root}/namespaces/{_segment(namespace)}/{plural}"


def _object(collection: str, name: str) -> str:
    return f"{collection}/{_segment(name)}"


def _needed(namespace: str) -> str:
    return namespace if namespace is not None else ""


def _segment(name: str) -> str:
    if not name or name in (".", ".."):
        raise ValueError(f"not the name of an object: {name!r}")
    return quote(name, safe="")
