"""What a run and its claim say of who pays -> one attribution, and the hash that makes equal ones one row."""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from app.api.keys import COST_CENTER_LABELS, TEAM_LABELS
from app.store.ledger_values import Labels, LedgerRun

NOBODY = ""


def labels_of(run: LedgerRun, said: Mapping[str, Any]) -> Labels:
    """``said``: the columns that `app.store.ledger.Due` carries. A bare Pod is its own workload."""
    tags = {str(key): str(value) for key, value in (said["labels"] or {}).items()}
    kind, _, count = run.accelerator.rpartition(":")
    return Labels(
        namespace=said["pod_namespace"],
        workload_kind=said["workload_kind"] or ("Pod" if said["pod_name"] else NOBODY),
        workload_name=said["workload_name"] or said["pod_name"],
        team=_first(tags, TEAM_LABELS),
        cost_center=_first(tags, COST_CENTER_LABELS),
        pool=said["pool"],
        provider=run.provider,
        account=run.account,
        account_id=said["account_id"] or "",
        region=run.region,
        sku=run.sku,
        tier=run.tier,
        accelerator=kind,
        accelerator_count=int(count) if kind and count.isdecimal() else 0,
        tags=tags,
    )


def hash_of(labels: Labels) -> str:
    """Equal attributions have equal hashes."""
    body = {name: getattr(labels, name) for name in Labels.__dataclass_fields__} | {"tags": dict(labels.tags)}
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _first(tags: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((tags[name] for name in names if tags.get(name)), NOBODY)
