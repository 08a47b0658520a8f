"""The words that conditions, phases, Events and metrics carry. Closed sets: scripts compare them."""

from collections.abc import Sequence
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
    DELETING = "Deleting"  # somebody has deleted it, and claims still name it


NAMES = 5  # shown in one message
POOL_VALID_MESSAGE: Final = "pool policy is valid"


def deleting_message(claims: Sequence[str]) -> str:
    """The message of reason ``Deleting``: how many claims hold the pool, and the first of them."""
    names = ", ".join(claims[:NAMES]) + (", …" if len(claims) > NAMES else "")
    left = "1 claim" if len(claims) == 1 else f"{len(claims)} claims"
    return f"{left} left ({names}): nothing new is placed, and the pool goes with the last machine"


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
    MACHINE_IN_DOUBT = "MachineInDoubt"  # only a person can tell whether one is its machine or a copy
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


def claim_deleted_message(claim: str) -> str:
    """The message of a Pod whose claim somebody has deleted while it ran; ``claim``: its name, if known."""
    named = f"NodeClaim {claim}" if claim else "its NodeClaim"
    return f"{named} was deleted, and its machine given back"


def never_started_message(deadline_s: float) -> str:
    """The message of a Pod whose machine was rented and did not start within ``deadline_s`` seconds."""
    return f"the machine was rented and did not start within {deadline_s:g} s: it was given back"


def retrying_message(error: str) -> str:
    """The message of a Pod whose machine could not be asked for, and will be again."""
    return f"retrying: {error}"


PLACED_CONDITION: Final = "nebula.inftyai.com/Placed"
"""The one condition type that placement writes, on gated Pods only."""


class PlacedReason(StrEnum):
    """Reasons of the condition `PLACED_CONDITION`, and of the Events beside it."""

    PLACED = "Placed"
    NO_POOL = "NoPool"
    INVALID_REQUEST = "InvalidRequest"
    ALL_BLOCKED = "AllBlocked"
    NO_CANDIDATE = "NoCandidate"
    STALE_CLAIM = "StaleClaim"
    OWNER_BACKOFF = "OwnerBackOff"
    ON_HOLD = "OnHold"  # nothing is placed now, whatever is asked for
    RENTING = "Renting"
    OTHER_GATES = "OtherGates"
    CONFIG_ERROR = "ConfigError"


class PodEvent(StrEnum):
    """Reasons of Events about a Pod, beside those of `PlacedReason` and `PodReason`."""

    OPTED_OUT = "OptedOut"
    NOT_BOUND = "NotBound"
    PROVISIONED = "Provisioned"
    PROVISION_RETRYING = "ProvisionRetrying"
    CLAIM_DELETED = "ClaimDeleted"
    TERMINATE_RETRYING = "TerminateRetrying"
    IMAGE_CHANGE_IGNORED = "ImageChangeIgnored"
    UNHEALTHY = "Unhealthy"  # this and the next ones are a kubelet's own words
    BACK_OFF = "BackOff"
    INVALID_NAMES = "InvalidEnvironmentVariableNames"
    NO_PULL_SECRET = "FailedToRetrieveImagePullSecret"


class ClaimEvent(StrEnum):
    """Reasons of Events about a NodeClaim, beside `ClaimReason`. Its pool is told of the Warnings."""

    RENTED = "Rented"
    REFUSED = "Refused"
    LOST = "Lost"  # the machine is gone, or is being taken back, and nobody here has asked for that
    RELEASED = "Released"


class PoolEvent(StrEnum):
    """Reasons of Events about a NodePool, beside those of `ClaimEvent` and `PoolReason`."""

    LIMIT_REACHED = "LimitReached"
    BUDGET_THRESHOLD = "BudgetThreshold"


MACHINES_KNOWN_CONDITION: Final = "nebula.inftyai.com/MachinesKnown"
"""On a virtual node, beside a kubelet's own: whether its provider tells what its machines are."""


class NodeReason(StrEnum):
    """Reasons of the condition `MACHINES_KNOWN_CONDITION`."""

    ANSWERS = "ProviderAnswers"
    SILENT = "ProviderSilent"


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
