"""What one sweep found, written down; and which open findings are over, and how.

A finding is over only when a whole list or a row says so: while a list is missing it stays open. A machine
that was ended is closed when its run is proven gone, not when a terminate was accepted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store import findings as rows
from app.store.sweep_facts import Rows
from app.sweep import metrics
from app.sweep.model import Facts, Finding, Judgement, Kind, MachineKey
from providers.base import MachineState, ResourceId

_OF_CLAIMS = (
    Kind.CLAIM_WITHOUT_MACHINE,
    Kind.CLAIM_WITHOUT_POD,
    Kind.RENTAL_ONLY,
    Kind.RUN_OPEN,
    Kind.STUCK,
    Kind.PROVIDER_REMOVED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """``ids``: the finding id of each key; ``new``: those found now; ``resolved``: key and how."""

    ids: Mapping[str, int]
    new: tuple[Finding, ...]
    resolved: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Runs:
    """What was last written of a sweep, so that only differences are."""

    told: Any = None
    at: datetime | None = None


@dataclass(slots=True)
class Trail:
    """Of one term."""

    installation: str
    leader: str
    version: str
    _runs: _Runs = field(default_factory=_Runs)

    async def write(
        self,
        conn: AsyncConnection,
        facts: Facts,
        judged: Iterable[Finding],
        before: Rows,
        *,
        parts_whole: frozenset[tuple[str, str, str]],
    ) -> Written:
        """Every finding, and the end of those that are over.

        ``parts_whole``: provider, account and list region ("": all) of each whole list of parts.
        """
        known = {row["key"]: row for row in before.findings}
        judged = tuple(judged)
        was = {key: (row["decision"], row["blocked_by"]) for key, row in known.items()}
        ids = await rows.sighted(conn, [sighted(one, self.installation) for one in judged], before=was)
        new = [one for one in judged if one.key not in known]
        for one in new:
            if one.kind is Kind.NO_CLAIM:
                metrics.DETECT.observe(max(0.0, (facts.now - one.since).total_seconds()))
        resolved = []
        absent = {
            (row["provider"], row["account"], ResourceId(row["resource_id"])): row["absent_since"]
            for row in before.seen
        }
        shown = {one.key for one in facts.machines if one.state is not MachineState.GONE}
        for key, row in known.items():
            if key in ids:
                continue
            over = _over(row, facts, shown=shown, absent=absent, parts_whole=parts_whole)
            if over is None:
                continue
            how, gone_at = over
            await rows.resolve(conn, row["id"], how=how, gone_at=gone_at)
            if gone_at is not None:
                metrics.GONE.observe(max(0.0, (gone_at - row["first_seen_at"]).total_seconds()))
            resolved.append((key, how))
        return Written(ids=ids, new=tuple(new), resolved=tuple(resolved))

    async def ran(
        self,
        conn: AsyncConnection,
        facts: Facts,
        judgement: Judgement,
        *,
        mode: str,
        terminated: int,
        findings: Iterable[Finding],
    ) -> None:
        """The sweep itself: if it differs from the one before, or that was a quarter of an hour ago."""
        why = facts.mode
        reasons = [text for text in (why.report, why.held, why.not_leader, why.claims_unread) if text]
        run = rows.Run(
            started_at=facts.now,
            version=self.version,
            mode=mode,
            leader=self.leader,
            ours=judgement.ours,
            report_only=reasons,
            places=[
                {
                    "provider": place.provider,
                    "account": place.account,
                    "region": place.region,
                    "machines": place.machines,
                    "unknown": place.unknown,
                }
                for places in facts.places.values()
                for place in places
            ],
            findings=dict(Counter(one.kind.value for one in findings)),
            others=[
                {
                    "provider": one.provider,
                    "account": one.account,
                    "installation": one.installation,
                    "machines": one.machines,
                    "usd_per_hour": None if one.usd_per_hour is None else str(one.usd_per_hour),
                }
                for one in judgement.not_ours
            ],
            bounds={
                f"{key[0]}/{key[1]}": bounds.orphan_s
                for key, bounds in facts.bounds.items()
                if bounds.orphan_s
            },
            terminated=terminated,
            blocked=dict(judgement.blocked),
        )
        told = (
            mode,
            tuple(reasons),
            run.ours,
            run.findings,
            run.others,
            run.blocked,
            terminated,
            _unknown(run),
        )
        last = self._runs
        due = last.at is None or (facts.now - last.at).total_seconds() >= rows.RUN_EVERY_S
        if due or told != last.told:
            await rows.ran(conn, run)
            metrics.UNEXPLAINED.set(float(await rows.unexplained_usd(conn) or 0))
            metrics.UNEXPLAINED_SHARE.set(float(await rows.unexplained_share(conn)))
            last.told, last.at = told, facts.now


def _unknown(run: rows.Run) -> tuple[str, ...]:
    return tuple(sorted(str(place["provider"]) for place in run.places if place["unknown"]))


def _over(
    row: RowMapping,
    facts: Facts,
    *,
    shown: set[MachineKey],
    absent: Mapping[MachineKey, datetime | None],
    parts_whole: frozenset[tuple[str, str, str]],
) -> tuple[str, datetime | None] | None:
    """How a finding that is none any more has ended; None while that cannot be told."""
    kind, account = Kind(row["kind"]), (row["provider"], row["account"])
    if kind is Kind.LEFTOVER_PART:
        if not parts_whole & {(*account, row["region"]), (*account, "")}:  # not asked yet, or not whole
            return None
        return ("gone", facts.now) if row["executed_at"] is not None else ("cleared", None)
    if kind in _OF_CLAIMS:
        return None if facts.mode.claims_unread is not None else ("cleared", None)
    places = facts.places.get(account, ())
    if account in facts.bounds and (not places or any(place.unknown for place in places)):
        return None
    key: MachineKey = (*account, ResourceId(row["resource_id"]))
    run = facts.runs.get(key)
    if run is not None and run.gone_at is not None:
        return "gone", run.gone_at
    if key in shown:
        rental = facts.rentals.get(run.uid) if run is not None else None
        if rental is not None and rental.state in ("ending", "ended"):
            return None  # on its way out
        if rental is not None and rental.state == "live" and rental.resource_id == key[2]:
            return "adopted", None
        return "cleared", None
    if run is not None:
        return None  # its end is provisioning's to prove
    if key in absent:
        since = absent[key]
        return ("gone", since) if since is not None and key in facts.lost else None
    return "cleared", None


def sighted(one: Finding, installation: str) -> rows.Sighted:
    """A finding as its row."""
    return rows.Sighted(
        key=one.key,
        kind=one.kind.value,
        mark=one.mark,
        installation=installation,
        provider=one.provider,
        account=one.account,
        region=one.region,
        resource_id=one.resource_id,
        identity=one.raw_identity,
        claim_uid=one.claim_uid,
        attempt=one.attempt,
        provider_created_at=one.provider_created_at,
        provider_state=one.state,
        exists_since=one.since,
        usd_per_hour=one.usd_per_hour,
        cost_so_far=one.cost_so_far,
        namespace=one.owner.namespace,
        workload=one.owner.pod,
        why=one.why,
        decision=one.next.value,
        decided_by=one.by.value,
        blocked_by=one.blocked_by,
        eligible_at=one.eligible_at,
        evidence={
            "rules": [
                {"rule": rule.name, "passed": rule.passed, "detail": rule.detail, "until": rule.until}
                for rule in one.rules
            ]
        },
    )
