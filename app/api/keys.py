"""Every name that Nebula puts on, or reads from, a Kubernetes object.

Users' manifests, dashboards and scripts depend on these strings, so a value here never changes. The functions
are pure: the same input gives the same name on every replica and after every restart.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

GROUP: Final = "nebula.inftyai.com"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "nebula"
AIBRIX_GROUP: Final = "cloud.aibrix.ai"

NODE_POOL: Final = "NodePool"
NODE_POOLS: Final = "nodepools"
NODE_CLAIM: Final = "NodeClaim"
NODE_CLAIMS: Final = "nodeclaims"
CLOUD_POD_BINDING: Final = "CloudPodBinding"
CLOUD_POD_BINDINGS: Final = "cloudpodbindings"

# Labels. A label value has at most 63 characters; a NodePool's name is held to that by its CRD.
ENABLED_LABEL: Final = f"{GROUP}/enabled"
ENABLED: Final = "true"  # exactly this opts a Pod in; anything else does not
NODE_POOL_LABEL: Final = f"{GROUP}/nodepool"
ACCELERATOR_TYPE_LABEL: Final = f"{GROUP}/accelerator-type"
PROVIDER_LABEL: Final = f"{GROUP}/provider"
ACCOUNT_LABEL: Final = f"{GROUP}/account"
INSTALLATION_LABEL: Final = f"{GROUP}/installation"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "nebula"
HOSTNAME_LABEL: Final = "kubernetes.io/hostname"
NODE_ROLE_LABELS: Final = ("node-role.kubernetes.io/worker", "node-role.kubernetes.io/nebula")  # values empty

# Annotations of a Pod that only we may set; admission clears whatever a user put there.
CAPACITY_TYPE_ANNOTATION: Final = f"{GROUP}/capacity-type"
REGION_ANNOTATION: Final = f"{GROUP}/region"
ENDPOINT_ANNOTATION: Final = f"{GROUP}/endpoint"
INSTANCE_ID_ANNOTATION: Final = f"{GROUP}/instance-id"
OWN_POD_ANNOTATIONS: Final = frozenset(
    {CAPACITY_TYPE_ANNOTATION, REGION_ANNOTATION, ENDPOINT_ANNOTATION, INSTANCE_ID_ANNOTATION}
)

# Annotations of a Pod that its author may set.
REGIONS_ANNOTATION: Final = f"{GROUP}/regions"
DEAD_MAN_ANNOTATION: Final = f"{GROUP}/dead-man"
DEAD_MAN_OFF: Final = "off"
MAX_PRICE_ANNOTATION: Final = f"{AIBRIX_GROUP}/max-price"
VAST_VERIFIED_ANNOTATION: Final = f"{AIBRIX_GROUP}/vast-verified"
VAST_MACHINE_ID_ANNOTATION: Final = f"{AIBRIX_GROUP}/vast-machine-id"
VAST_DISK_GB_ANNOTATION: Final = f"{AIBRIX_GROUP}/vast-disk-gb"
VAST_OFFER_ID_ANNOTATION: Final = f"{AIBRIX_GROUP}/vast-offer-id"

# Annotation of our webhook configurations: the namespace of the installation that they belong to.
NAMESPACE_ANNOTATION: Final = f"{GROUP}/namespace"

# Annotation of a NodeClaim: who the money is put down to, as the Pod said when it was placed.
ATTRIBUTION_ANNOTATION: Final = f"{GROUP}/attribution"
# Annotation of a NodeClaim: its machines that the database could not take down while it was away.
UNRECORDED_ANNOTATION: Final = f"{GROUP}/unrecorded"
TEAM_LABELS: Final = (f"{GROUP}/team", "team", "app.kubernetes.io/team")
COST_CENTER_LABELS: Final = (f"{GROUP}/cost-center", "cost-center", "costcenter")

SCHEDULING_GATE: Final = f"{GROUP}/provider-selection"
TAINT_KEY: Final = PROVIDER_LABEL
TAINT_EFFECT: Final = "NoSchedule"
TOLERATION: Final[Mapping[str, str]] = {"key": TAINT_KEY, "operator": "Exists", "effect": TAINT_EFFECT}
CLAIM_FINALIZER: Final = f"{GROUP}/terminate-instance"
POOL_FINALIZER: Final = f"{GROUP}/pool-in-use"  # a pool stays readable while a claim names it

GPU_RESOURCE: Final = "nvidia.com/gpu"

DEFAULT_ACCOUNT: Final = "default"
LEASE_NAME: Final = GROUP
SYSTEM_NAMESPACE: Final = "nebula-system"
MANAGER_NAME: Final = "nebula-controller-manager"
WEBHOOK_SERVICE: Final = "nebula-webhook-service"
WEBHOOK_CERT_SECRET: Final = "nebula-webhook-server-cert"
WEBHOOK_CA_NAME: Final = "nebula-ca"
MUTATING_WEBHOOK_CONFIGURATION: Final = "nebula-mutating-webhook-configuration"
VALIDATING_WEBHOOK_CONFIGURATION: Final = "nebula-validating-webhook-configuration"
POD_MUTATING_WEBHOOK: Final = f"mpod-v1.{GROUP}"
POD_MUTATING_PATH: Final = "/mutate--v1-pod"  # two hyphens: the core group is empty
POD_VALIDATING_WEBHOOK: Final = f"vpod-v1.{GROUP}"
POD_VALIDATING_PATH: Final = "/validate--v1-pod"
POD_WARNING_WEBHOOK: Final = f"wpod-v1.{GROUP}"
POD_WARNING_PATH: Final = "/warn--v1-pod"
NODE_POOL_VALIDATING_WEBHOOK: Final = f"vnodepool-v1alpha1.{GROUP}"
NODE_POOL_VALIDATING_PATH: Final = "/validate-nebula-inftyai-com-v1alpha1-nodepool"
UNMANAGED_NAMESPACES: Final = ("kube-system", "kube-node-lease", "kube-public", SYSTEM_NAMESPACE)

_NAME_MAX = 253  # of an object's name
_LABEL_MAX = 63  # of a label's value, and of a DNS label
_HASH_DIGITS = 10
_CUT = _NAME_MAX - 1 - _HASH_DIGITS
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def claim_name(namespace: str, pod: str) -> str:
    """The plain name of a Pod's NodeClaim: ``<namespace>-<pod>``, hashed at the end only when too long.

    Two Pods can share it (``a-b``/``c`` and ``a``/``b-c``): whoever finds a claim by name compares the Pod's
    UID recorded in it before doing anything, and takes `hashed_claim_name` when the name is held by another.
    """
    joined = f"{namespace}-{pod}"
    if len(joined) <= _NAME_MAX:
        return joined
    return _with_hash(joined, f"{namespace}/{pod}")


def hashed_claim_name(namespace: str, pod: str, *, uid: str, candidate: int) -> str:
    """The name of a claim that cannot have the plain one.

    For the ``candidate``-th (from 1) claim of the Pod with this UID: the second and later ones, or the first
    when another Pod's claim holds the plain name. It is the same at every call, so that a replica that
    crashed after creating the claim meets its own object rather than making a second one.
    """
    return _with_hash(f"{namespace}-{pod}", f"{namespace}/{pod}/{uid}/{candidate}")


def binding_name(claim: str) -> str:
    """The name of a claim's CloudPodBinding, in the Pod's namespace: the claim's own.

    Not the Pod's: a Pod whose first candidate is still being released has two claims, and two bindings.
    """
    return claim


def node_name(provider: str, account: str = DEFAULT_ACCOUNT) -> str:
    """The virtual node of a provider account: ``nebula-<provider>``, and ``-<account>`` where not default.

    Raises:
        ValueError: the name would be no DNS label of at most 63 characters, which the label
            ``kubernetes.io/hostname`` and the node's address need.
    """
    name = f"nebula-{provider}" if account == DEFAULT_ACCOUNT else f"nebula-{provider}-{account}"
    if len(name) > _LABEL_MAX or not _DNS_LABEL.fullmatch(name):
        raise ValueError(
            f"{name!r} is no node name: provider and account must be lower-case letters, digits and hyphens,"
            f" and the name has at most {_LABEL_MAX} characters"
        )
    return name


def placement_labels(provider: str, account: str = DEFAULT_ACCOUNT) -> dict[str, str]:
    """What a virtual node carries and a placed Pod selects: provider, and account where not default."""
    labels = {PROVIDER_LABEL: provider}
    if account != DEFAULT_ACCOUNT:
        labels[ACCOUNT_LABEL] = account
    return labels


def node_labels(provider: str, account: str = DEFAULT_ACCOUNT) -> dict[str, str]:
    """All labels of a provider account's virtual node.

    Raises:
        ValueError: as `node_name`.
    """
    return {
        HOSTNAME_LABEL: node_name(provider, account),
        MANAGED_BY_LABEL: MANAGED_BY,
        **dict.fromkeys(NODE_ROLE_LABELS, ""),
        **placement_labels(provider, account),
    }


def node_taint(provider: str) -> dict[str, str]:
    """The taint that keeps every Pod off a virtual node but those that `TOLERATION` lets on."""
    return {"key": TAINT_KEY, "value": provider, "effect": TAINT_EFFECT}


def claim_labels(*, pool: str, provider: str, account: str, installation: str) -> dict[str, str]:
    """The labels that every NodeClaim, and its CloudPodBinding, is created with."""
    return {
        MANAGED_BY_LABEL: MANAGED_BY,
        NODE_POOL_LABEL: pool,
        PROVIDER_LABEL: provider,
        ACCOUNT_LABEL: account,
        INSTALLATION_LABEL: installation,
    }


def connect_secret_name(pod: str) -> str:
    """The Secret, in the Pod's namespace, with the machine's URL and token."""
    return f"{pod}-connect"


def _with_hash(joined: str, hashed: str) -> str:
    digest = hashlib.sha256(hashed.encode()).hexdigest()[:_HASH_DIGITS]
    head = joined[:_CUT]
    if head.endswith("."):  # ".-" is no valid name: the API server would refuse the claim for ever
        head = f"{head[:-1]}-"
    return f"{head}-{digest}"
