"""What became of a claim, as Events about it. What went wrong is told of its pool as well, without names.

An operator reads the pool's: equal ones of many claims are one Event with a count. Nothing here decides
anything, and a process that starts tells nothing again that the claim's own status shows.
"""

from typing import Final

from app.api.quantities import usd
from app.api.reasons import ClaimEvent
from app.kube.cache import Cache
from app.kube.client import Obj
from app.kube.events import Recorder
from app.provisioning.model import ClaimSpec, Refused, View
from providers.base import EndReason

_LOST: Final = {
    EndReason.PREEMPTED: "the provider has taken it back",
    EndReason.FAILED: "the provider says that it failed",
    EndReason.TERMINATED: "somebody else has ended it",
    EndReason.LIFETIME: "the provider's longest lifetime was reached",
}


class Telling:
    """``pools`` finds the object that the pool's Events are about."""

    def __init__(self, *, events: Recorder, pools: Cache) -> None:
        self._events, self._pools = events, pools

    def rented(self, claim: Obj, spec: ClaimSpec, view: View) -> None:
        """Its machine shows on the status for the first time."""
        machine = view.ref.resource_id if view.ref is not None else ""
        price = f", for {usd(view.usd_per_hour)} an hour" if view.usd_per_hour is not None else ""
        message = f"machine {machine} is rented at {spec.place}{price}"
        self._events.note(claim, type="Normal", reason=ClaimEvent.RENTED, message=message)

    def refused(self, claim: Obj, spec: ClaimSpec, refusal: Refused) -> None:
        """The cloud, or we before asking it, said no: the claim is of no further use."""
        asked = f" {spec.accelerator}" if spec.accelerator is not None else ""
        message = f"{spec.place} refused{asked}, {refusal.kind}: {refusal.message}"
        self._warn(claim, spec, ClaimEvent.REFUSED, message, of_all=message)

    def lost(self, claim: Obj, spec: ClaimSpec, view: View, why: str) -> None:
        """Its machine is over, and nobody here has asked for that."""
        machine = view.ref.resource_id if view.ref is not None else ""
        message = f"machine {machine} at {spec.place} is lost: {why}"
        self._warn(claim, spec, ClaimEvent.LOST, message, of_all=f"a machine at {spec.place} is lost: {why}")

    def released(self, claim: Obj, *, reason: str) -> None:
        """Proven gone. Of a claim that never showed a machine there is nothing to tell."""
        machine = (claim.get("status") or {}).get("instanceID")
        if machine:
            message = f"machine {machine} is gone for good ({reason})"
            self._events.note(claim, type="Normal", reason=ClaimEvent.RELEASED, message=message)

    def _warn(self, claim: Obj, spec: ClaimSpec, reason: ClaimEvent, message: str, *, of_all: str) -> None:
        self._events.note(claim, type="Warning", reason=reason, message=message)
        pool = self._pools.get("", spec.pool)
        if pool is not None:
            self._events.note(pool, type="Warning", reason=reason, message=of_all)


def why_lost(view: View) -> str | None:
    """How a machine that nobody here has ended came to its end; None if it has not, or its work was done."""
    if view.state != "live" or view.ref is None:
        return None
    end = view.machine.end if view.machine is not None else None
    if end is not None and end.reason in _LOST:
        return f"{_LOST[end.reason]}: {end.message}" if end.message else _LOST[end.reason]
    return "the provider does not have it any more" if view.gone and end is None else None
