"""What the status of a claim and of its binding should say, from what provisioning knows. Pure.

Two rules keep the statuses true: a phase never goes back, and nothing that was written is blanked because it
is not known at the moment (a new leader's first seconds). Nothing is read from the Pod's annotations.
"""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from app.api.keys import node_name
from app.api.quantities import format_money
from app.api.reasons import BindingCondition, BindingReason, ClaimCondition, ClaimPhase, ClaimReason
from app.kube.client import Obj
from app.kube.patches import condition
from app.provisioning.model import ClaimSpec, View
from providers.base import Machine, MachineState, RejectionKind

_ORDER: tuple[str, ...] = tuple(ClaimPhase)
_MONEY_STEP = Decimal(1).scaleb(-9)  # as fine as the API's money is
_OVER = (MachineState.EXITED, MachineState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why release cannot go on without a person, and under which reason that is told."""

    reason: ClaimReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What there is to show, and what of it is worth a write now.

    ``shown``: the recorded machine may be shown. ``leaving``: claim, Pod or rental is ending; ``over``: the
    machine is; both not only for a moment. ``finding``: why release cannot go on without a person.
    """

    view: View
    shown: bool
    leaving: bool
    over: bool = False
    finding: Finding | None = None


def committed(view: View) -> bool:
    """Whether a machine is recorded whose capacity the cloud has committed: it bills, or is about to."""
    queued = view.machine is not None and view.machine.state is MachineState.QUEUED
    return view.state == "live" and view.ref is not None and view.reserved and not queued and not view.gone


def machine_over(view: View) -> bool:
    """Whether the workload or the machine is over, though the rental is not: it may be restarted in place."""
    return view.gone or (view.machine is not None and view.machine.state in _OVER)


def claim_status(claim: Obj, spec: ClaimSpec, sight: Sight, *, now: datetime) -> dict[str, Any]:
    """The fields of a NodeClaim's status that are ours to write. ``attempt`` is not."""
    status = claim.get("status") or {}
    wanted: dict[str, Any] = {"phase": phase(status.get("phase"), sight)}
    ref = sight.view.ref
    if sight.shown and ref is not None:
        wanted |= {"instanceID": ref.resource_id, "account": ref.account, "region": ref.region}
        wanted["nodeName"] = node_name(spec.provider, spec.account)
        if endpoint := _endpoint(sight.view):
            wanted["endpoint"] = endpoint
    held = status.get("conditions") or []
    if sight.finding is not None:
        wanted["conditions"] = condition(
            held,
            type=ClaimCondition.RELEASED,
            status="False",
            reason=sight.finding.reason,
            message=sight.finding.message,
            now=now,
        )
    elif any(each["type"] == ClaimCondition.RELEASED for each in held):
        wanted["conditions"] = [each for each in held if each["type"] != ClaimCondition.RELEASED]
    return wanted


def phase(held: str | None, sight: Sight) -> str | None:
    """The phase to show, never an earlier one than ``held``. Provisioning itself comes with the mark."""
    wanted: str | None = None
    if sight.leaving:
        wanted = ClaimPhase.TERMINATED if sight.view.state == "ended" else ClaimPhase.TERMINATING
    elif sight.shown and committed(sight.view):
        wanted = ClaimPhase.BOUND
    return wanted if _rank(wanted) > _rank(held) else held


def binding_status(binding: Obj, claim_phase: str | None, sight: Sight, *, now: datetime) -> dict[str, Any]:
    """The status of the claim's CloudPodBinding. Empty as long as there is nothing to tell."""
    view = sight.view
    machine_shown = sight.shown and view.ref is not None
    if not machine_shown and view.refusal is None and not sight.leaving:
        return {}
    status = binding.get("status") or {}
    wanted: dict[str, Any] = {"phase": claim_phase}
    if machine_shown and view.ref is not None:
        wanted["instanceID"] = view.ref.resource_id
        if endpoint := _endpoint(view):
            wanted["endpoint"] = endpoint
        if price := _price(view):
            wanted["pricePerHour"] = price
    conditions = status.get("conditions") or []
    for kind, (value, reason, message) in _conditions(conditions, sight).items():
        conditions = condition(conditions, type=kind, status=value, reason=reason, message=message, now=now)
    wanted["conditions"] = conditions or None
    return wanted


_Said = tuple[str, str, str]  # status, reason, message


def _conditions(held: list[Obj], sight: Sight) -> dict[str, _Said]:
    view = sight.view
    said: dict[str, _Said] = {}
    if (capacity := _capacity(sight)) is not None:
        said[BindingCondition.CAPACITY] = capacity
    if sight.leaving and view.state == "ended":
        over = ("False", BindingReason.TERMINATED.value, "no machine is left")
        known = {each["type"] for each in held} | ({BindingCondition.PROVISIONED} if view.ref else set())
        return said | {
            kind: over for kind in (BindingCondition.PROVISIONED, BindingCondition.READY) if kind in known
        }
    if view.refusal is not None and (view.ref is None or not sight.shown):
        short = view.refusal.kind is RejectionKind.CAPACITY
        reason = BindingReason.NO_CAPACITY if short else BindingReason.REJECTED
        said[BindingCondition.PROVISIONED] = ("False", reason, view.refusal.message)
        return said
    if sight.shown and view.ref is not None and view.state is not None:
        said[BindingCondition.PROVISIONED] = (
            "True",
            BindingReason.PROVISIONED,
            f"machine {view.ref.resource_id} is rented",
        )
    has_ready = any(each["type"] == BindingCondition.READY for each in held)
    if (ready := _ready(sight, has_ready=has_ready)) is not None:
        said[BindingCondition.READY] = ready
    return said


def _capacity(sight: Sight) -> _Said | None:
    refusal = sight.view.refusal
    if sight.shown and committed(sight.view):
        return ("True", BindingReason.AVAILABLE, "the provider has committed a machine")
    if refusal is not None and refusal.kind is RejectionKind.CAPACITY:
        return ("False", BindingReason.NO_CAPACITY, refusal.message)
    return None


def _ready(sight: Sight, *, has_ready: bool) -> _Said | None:
    view, machine = sight.view, sight.view.machine
    if sight.leaving:
        return ("False", BindingReason.TERMINATING, "the machine is being ended") if has_ready else None
    if not sight.shown or view.ref is None or view.state is None:
        return None
    if machine_over(view):
        return ("False", BindingReason.TERMINATED, "the machine is over") if sight.over else None
    if machine is not None and machine.state is MachineState.RUNNING:
        return ("True", BindingReason.RUNNING, "the machine is reachable")
    if machine is None and has_ready:
        return None  # not looked at yet since we started
    return ("False", BindingReason.INITIALIZING, "the machine is not reachable yet")


def _endpoint(view: View) -> str | None:
    return view.machine.endpoint if view.machine is not None else None


def _price(view: View) -> str | None:
    """Dollars an hour of the machine while it runs; None when unknown, which blanks nothing."""
    machine: Machine | None = view.machine
    if view.usd_per_hour is None or (machine is not None and machine.state in _OVER):
        return None
    try:
        return format_money(view.usd_per_hour.quantize(_MONEY_STEP))
    except (ValueError, ArithmeticError):  # absurd, so unpriced
        return None


def _rank(phase: str | None) -> int:
    return _ORDER.index(phase) + 1 if phase in _ORDER else 0
