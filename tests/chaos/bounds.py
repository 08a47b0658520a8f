"""The promise in numbers: no machine of ours outlives its claim by more than the bound that the sweep prints.

Asked of the rows once a schedule's faults have stopped: how long each machine had no claim, counted
from then at the earliest, for the bound counts while the cloud answers.
"""

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

Rows = Callable[[str], Awaitable[list[Any]]]


async def now(rows: Rows) -> datetime:
    """The database's clock."""
    (row,) = await rows("select clock_timestamp() as at")
    moment: datetime = row["at"]
    return moment


async def nobody_was_forgotten(rows: Rows, *, since: datetime) -> None:
    """Raises AssertionError with the machines that took longer, and by how much."""
    swept = await rows("select bounds from sweep_run where bounds::text <> '{}' order by id desc limit 1")
    if not swept:  # no leader has swept yet
        return
    bounds = json.loads(swept[0]["bounds"])
    alone = await rows(f"""
        select r.provider || '/' || r.account as account, r.resource_id, extract(epoch from r.gone_at
            - greatest(c.gone_at, r.provider_created_at, r.first_seen_at, '{since.isoformat()}')) as s
        from run r join claim c on c.uid = r.claim_uid where r.gone_at is not null and c.gone_at is not null
    """)
    late = [
        (row["resource_id"], float(row["s"]), bounds[row["account"]])
        for row in alone
        if row["account"] in bounds and float(row["s"]) > bounds[row["account"]]
    ]
    assert not late, f"machine, seconds without a claim, bound: {late}"
