"""What a claim remembers for a database that is away: machines that no row could take down.

Written before such a machine is ended, so that whoever leads when the database is back can write its run,
though nothing of the machine is there any more. Kept until the claim goes: a database may be restored.

It becomes money, so it is sealed with the installation's secret, for one claim: what somebody has edited, or
copied from another claim, is nothing at all.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson
import structlog

from app.provisioning.model import ClaimSpec, Unrecorded
from providers.base import Meter, MeterKind, Ref, ResourceId

log = structlog.get_logger()


def encoded(machines: Sequence[Unrecorded], claim: ClaimSpec, *, secret: bytes) -> str:
    """These machines as text for the claim. Times in ISO 8601, amounts as exact text."""
    # There and back, so that what is sealed is what will be read.
    told = orjson.loads(orjson.dumps([_told(machine) for machine in machines]))
    return orjson.dumps({"machines": told, "seal": _seal(told, claim, secret)}).decode()


def decoded(text: str, claim: ClaimSpec, *, secret: bytes) -> tuple[Unrecorded, ...]:
    """The machines that the claim remembers; none where somebody has edited that."""
    if not text:
        return ()
    try:
        held = orjson.loads(text)
        if not hmac.compare_digest(held["seal"], _seal(held["machines"], claim, secret)):
            raise ValueError("it is not as we wrote it")
        return tuple(_read(one, claim) for one in held["machines"])
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        log.warning("a claim's memory of its machines is not used", claim=claim.name, error=repr(error)[:256])
        return ()


def merged(held: Iterable[Unrecorded], told: Iterable[Unrecorded]) -> list[Unrecorded]:
    """What is remembered once ``told`` is, too: one entry a machine.

    What was shown says more than what was answered. Of two alike the later one counts: each is told right
    before an end is asked for, and the one before it was not accepted, as far as we know.
    """
    machines = {one.ref.resource_id: one for one in held}
    for one in told:
        old = machines.get(one.ref.resource_id)
        if old is None or one.shown or not old.shown:
            machines[one.ref.resource_id] = one
    return list(machines.values())


def meters_json(meters: Iterable[Meter]) -> list[dict[str, str | None]]:
    """Meters as stored: exact decimals as strings."""
    return [
        {
            "kind": meter.kind.value,
            "quantity": str(meter.quantity),
            "usd": None if meter.usd is None else str(meter.usd),
            "label": meter.label,
        }
        for meter in meters
    ]


def _seal(told: object, claim: ClaimSpec, secret: bytes) -> str:
    body = orjson.dumps([claim.uid, claim.provider, claim.account, told])
    return hmac.new(secret, b"nebula claim memory 1\0" + body, hashlib.sha256).hexdigest()


def _told(machine: Unrecorded) -> dict[str, Any]:
    return {
        "instanceID": machine.ref.resource_id,
        "region": machine.ref.region,
        "identity": machine.identity,
        "accountID": machine.account_id,
        "createdAt": machine.created_at,
        "shown": machine.shown,
        "askedAt": machine.asked_at,
        "meters": meters_json(machine.meters),
    }


def _read(told: dict[str, Any], claim: ClaimSpec) -> Unrecorded:
    return Unrecorded(
        ref=Ref(
            provider=claim.provider,
            account=claim.account,
            region=told["region"],
            resource_id=ResourceId(told["instanceID"]),
        ),
        identity=told["identity"],
        meters=tuple(
            Meter(
                kind=MeterKind(one["kind"]),
                quantity=Decimal(one["quantity"]),
                usd=None if one["usd"] is None else Decimal(one["usd"]),
                label=one["label"],
            )
            for one in told["meters"]
        ),
        created_at=_time(told["createdAt"]),
        account_id=told["accountID"],
        shown=told["shown"],
        asked_at=_time(told["askedAt"]),
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
