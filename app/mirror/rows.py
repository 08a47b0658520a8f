"""NodeClaim and CloudPodBinding, as the API server sent them, -> the row that is kept of each.

What an object leaves out is an empty text where the column asks for one. A price that is no number is
unknown, never zero.
"""

import json
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from app.api.keys import ATTRIBUTION_ANNOTATION, DEFAULT_ACCOUNT
from app.store.mirrored import BindingRow, ClaimRow

Obj = dict[str, Any]


def claim_row(obj: Obj, *, gone: bool = False) -> ClaimRow:
    """The row of a NodeClaim.

    Raises:
        KeyError, ValueError: it is no NodeClaim of ours.
    """
    metadata, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    pod = spec["podRef"]
    return ClaimRow(
        uid=metadata["uid"],
        name=metadata["name"],
        pod_namespace=pod["namespace"],
        pod_name=pod["name"],
        pod_uid=pod["uid"],
        pool=_text(spec.get("poolRef")),
        provider=spec["provider"],
        account=spec.get("account") or DEFAULT_ACCOUNT,
        region=_text(spec.get("region")),
        tier=_text(spec.get("capacityType")),
        accelerator=_text(spec.get("accelerator")),
        **_attribution(metadata),
        phase=_text(status.get("phase")),
        instance_id=_text(status.get("instanceID")) or None,
        resource_version=int(metadata["resourceVersion"]),
        created_at=_time(metadata["creationTimestamp"]),
        deleting_since=_time(since) if (since := metadata.get("deletionTimestamp")) else None,
        gone=gone,
    )


def binding_row(obj: Obj, *, gone: bool = False) -> BindingRow:
    """The row of a CloudPodBinding.

    Raises:
        KeyError, ValueError: it is no CloudPodBinding of ours.
    """
    metadata, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    return BindingRow(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        claim_name=spec["claimName"],
        pod_uid=spec["podRef"]["uid"],
        provider=spec["provider"],
        account=spec.get("account") or DEFAULT_ACCOUNT,
        region=_text(spec.get("region")),
        tier=_text(spec.get("capacityType")),
        external_name=_text(spec.get("externalName")) or None,
        phase=_text(status.get("phase")),
        instance_id=_text(status.get("instanceID")) or None,
        endpoint=_text(status.get("endpoint")) or None,
        usd_per_hour=_price(status.get("pricePerHour")),
        conditions=tuple(_clean(condition) for condition in status.get("conditions") or ()),
        resource_version=int(metadata["resourceVersion"]),
        created_at=_time(metadata["creationTimestamp"]),
        gone=gone,
    )


def _attribution(metadata: Obj) -> dict[str, Any]:
    """Who the claim's machine is paid for, as placement wrote it down; nothing where that cannot be read."""
    text = (metadata.get("annotations") or {}).get(ATTRIBUTION_ANNOTATION)
    try:
        said = json.loads(text) if text else {}
        labels = {str(key): str(value) for key, value in (said.get("labels") or {}).items()}
        found = {"workload_kind": str(said.get("kind") or ""), "workload_name": str(said.get("name") or "")}
    except (ValueError, AttributeError):
        return {}
    return {**{name: _text(value) for name, value in found.items()}, "labels": _clean(labels)}


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)  # 3.11 and newer read the Z


def _price(text: str | None) -> Decimal | None:
    try:
        price = Decimal(text) if text else None
    except InvalidOperation:
        return None
    return price if price is not None and price.is_finite() else None


def _text(text: str | None) -> str:
    """Postgres keeps every character but NUL."""
    return (text or "").replace("\0", "")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
