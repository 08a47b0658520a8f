"""What a claim remembers for a database that is away: machines that no row could take down.

Written before such a machine is ended, so that whoever leads when the database is back can write its run,
though nothing of the machine is there any more. Kept until the claim goes: a database may be restored.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson
import structlog

from app.api.keys import DEFAULT_ACCOUNT, UNRECORDED_ANNOTATION
from app.kube.client import Obj
from app.provisioning.core import meters_json
from app.provisioning.model import Unrecorded
from providers.base import Meter, MeterKind, Ref, ResourceId

log = structlog.get_logger()


def annotation(machines: Sequence[Unrecorded]) -> dict[str, str]:
    """The annotation that tells of these machines. Times in ISO 8601, amounts as exact text."""
    return {UNRECORDED_ANNOTATION: orjson.dumps([_told(machine) for machine in machines]).decode()}


def unrecorded(claim: Obj) -> tuple[Unrecorded, ...]:
    """The machines that this NodeClaim remembers; none where somebody has made that unreadable."""
    text = (claim["metadata"].get("annotations") or {}).get(UNRECORDED_ANNOTATION)
    if not text:
        return ()
    spec = claim["spec"]
    try:
        return tuple(
            _read(one, provider=spec["provider"], account=spec.get("account") or DEFAULT_ACCOUNT)
            for one in orjson.loads(text)
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        log.warning("a claim's memory of its machines cannot be read", error=repr(error)[:256])
        return ()


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


def _read(told: dict[str, Any], *, provider: str, account: str) -> Unrecorded:
    return Unrecorded(
        ref=Ref(
            provider=provider,
            account=account,
            region=_text(told["region"]),
            resource_id=ResourceId(_text(told["instanceID"])),
        ),
        identity=_text(told["identity"]),
        meters=tuple(
            Meter(
                kind=MeterKind(one["kind"]),
                quantity=Decimal(one["quantity"]),
                usd=None if one["usd"] is None else Decimal(one["usd"]),
                label=_text(one["label"]),
            )
            for one in told["meters"]
        ),
        created_at=_time(told["createdAt"]),
        account_id=None if told["accountID"] is None else _text(told["accountID"]),
        shown=bool(told["shown"]),
        asked_at=_time(told["askedAt"]),
    )


def _text(value: object) -> str:
    """What Postgres takes as text.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("no text")
    return value


def _time(text: str | None) -> datetime | None:
    """Aware; a time without a zone is none that we wrote.

    Raises:
        ValueError: see there.
    """
    if text is None:
        return None
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return time
