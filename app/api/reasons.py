"""The words that conditions, phases, Events and metrics carry. Closed sets: scripts compare them."""

from enum import StrEnum
from typing import Final


class PoolCondition(StrEnum):
    """Condition types of a NodePool."""

    READY = "Ready"


class PoolReason(StrEnum):
    """Reasons of a NodePool's condition Ready. All but ``Valid`` go with status False."""

    VALID = "Valid"
    UNKNOWN_PROVIDER = "UnknownProvider"
    NOT_SUPPORTED = "NotSupported"  # the pool carries a field that this version would ignore


POOL_VALID_MESSAGE: Final = "pool policy is valid"


def unknown_providers_message(names: set[str] | frozenset[str]) -> str:
    """The message of reason ``UnknownProvider``; names sorted."""
    return f"no registered adapter for provider(s): {', '.join(sorted(names))}"


class ClaimPhase(StrEnum):
    """``NodeClaim.status.phase``. Absent until the served Pod was seen once.

    From Bound or Terminated a claim never goes back to Provisioning.
    """

    PROVISIONING = "Provisioning"
    BOUND = "Bound"
    TERMINATING = "Terminating"
    TERMINATED = "Terminated"


class ClaimCondition(StrEnum):
    """Condition types of a NodeClaim."""

    RELEASED = "Released"  # False while something that a person must mend keeps the claim from going


class ClaimReason(StrEnum):
    """Reasons of a NodeClaim's condition, and of Events about one."""

    PROVIDER_NOT_CONFIGURED = "ProviderNotConfigured"  # its machine may run on where nobody can end it
    UNREADABLE = "UnreadableClaim"  # it does not follow our schema


class BindingCondition(StrEnum):
    """Condition types of a CloudPodBinding."""

    PROVISIONED = "Provisioned"  # a machine was rented and is recorded
    READY = "Ready"  # the machine is reachable
    CAPACITY = "Capacity"  # False when the provider has none, so that the Pod does not merely look slow


class BindingReason(StrEnum):
    """Reasons of a CloudPodBinding's conditions."""

    PROVISIONING = "Provisioning"
    PROVISIONED = "Provisioned"
    INITIALIZING = "Initializing"
    RUNNING = "Running"
    AVAILABLE = "Available"
    NO_CAPACITY = "NoCapacity"
    REJECTED = "Rejected"
    UNKNOWN = "Unknown"
    TERMINATING = "Terminating"
    TERMINATED = "Terminated"


class PodReason(StrEnum):
    """``Pod.status.reason`` of a Pod on a virtual node."""

    PROVISIONING = "Provisioning"
    INITIALIZING = "Initializing"
    RUNNING = "Running"
    CONFIG_ERROR = "ConfigError"
    PROVISION_FAILED = "ProvisionFailed"
    FAILED = "Failed"
    TERMINATED = "Terminated"
    DEADLINE_EXCEEDED = "DeadlineExceeded"  # activeDeadlineSeconds, in a kubelet's own words
    PREEMPTED = "Preempted"  # a spot reclaim; comes with the condition DisruptionTarget


class PodMessage(StrEnum):
    """``Pod.status.message`` where it is fixed; ConfigError and ProvisionFailed carry the error."""

    ALLOCATING = "allocating external instance"
    INITIALIZING = "external instance is initializing"
    RUNNING = "external instance is running"
    FAILED = "external instance entered a failed state"
    GONE = "external instance is gone"
    TERMINATED = "external instance terminated"
    DEADLINE = "Pod was active on the node longer than the specified deadline"


def retrying_message(error: str) -> str:
    """The message of a Pod whose machine could not be asked for, and will be again."""
    return f"retrying: {error}"


PLACED_CONDITION: Final = "nebula.inftyai.com/Placed"
"""The one condition type that placement writes, on gated Pods only."""


class DeferralReason(StrEnum):
    """Why a Pod stays gated: label ``reason`` of ``nebula_placement_deferrals_total``."""

    NO_POOL = "no_pool"
    INVALID_REQUEST = "invalid_request"
    ALL_BLOCKED = "all_blocked"
    NO_CANDIDATE = "no_candidate"
    STALE_CLAIM = "stale_claim"
    OWNER_BACKOFF = "owner_backoff"  # its owner's Pods end by themselves, again and again


class SkipReason(StrEnum):
    """Why a candidate was passed over: in ``nebula why``, decisions and the skip counter."""

    PROVIDER_UNREGISTERED = "provider_unregistered"
    CAPACITY_TYPE_UNSUPPORTED = "capacity_type_unsupported"
    ACCELERATOR_UNSUPPORTED = "accelerator_unsupported"
    EGRESS_POLICY_UNSUPPORTED = "egress_policy_unsupported"
    BLOCKED = "blocked"
    PRICE = "price"
    LIMIT = "limit"
    BUDGET = "budget"
    LIFETIME = "lifetime"
    COMPLETION = "completion"
    REQUEST_UNSUPPORTED = "request_unsupported"
    NODE_UNAVAILABLE = "node_unavailable"
    NAMESPACE_NOT_ALLOWED = "namespace_not_allowed"


class ProvisionFailure(StrEnum):
    """Label ``reason`` of ``nebula_provision_failures_total``."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    AUTH = "auth"
    UNSUPPORTED_ACCELERATOR = "unsupported_accelerator"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    OTHER = "other"
