"""How the commands about orphans print what they found: the table, its totals, JSON and CSV."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from app.cli import output

if TYPE_CHECKING:
    from app.sweep.audit import Audit
    from app.sweep.model import Facts, Finding

TITLES = ("KIND", "PROVIDER", "INSTANCE", "AGE", "SEEN", "$/H", "SO FAR", "OWNER", "WHY", "NEXT")
RIGHT = ("AGE", "SEEN", "$/H", "SO FAR")


def show(found: "Audit", findings: Sequence["Finding"], resolved: Sequence[Any]) -> None:
    facts, now = found.facts, found.facts.now
    mode = (facts.mode.held and "HELD") or ((facts.mode.report and "report") or "sweep")
    cluster = found.cluster if found.unread is None else f"{found.cluster} ({found.unread})"
    click.echo(f"INSTALLATION {facts.installation}   CLAIMS {cluster}   MODE {mode}   LISTS {lists(facts)}")
    if not facts.places:
        click.echo("  no providers are given (--providers or NEBULA_PROVIDERS): no cloud was asked")
    for why in (facts.mode.held, facts.mode.report):
        if why:
            click.echo(f"  {why}")
    if found.last is None:
        click.echo("  no controller has swept yet")
    elif now - found.last["finished_at"] > timedelta(minutes=20):
        ago = output.since(found.last["finished_at"], now=now)
        click.echo(f"  the last sweep of a controller was {ago} ago")
    for key, bounds in sorted(facts.bounds.items()):
        if bounds.interval_s:
            bound = output.age(bounds.orphan_s)
            click.echo(f"  {key[0]}/{key[1]}: an orphan of ours has ended within {bound}")
    table = [row(one, now) for one in findings]
    for others in found.judgement.not_ours:
        what = "other-cluster" if others.installation else "foreign"
        why = f"installation {others.installation}" if others.installation else "no identity of ours"
        count = f"{others.machines} instance{'s' if others.machines > 1 else ''}"
        price = usd(others.usd_per_hour)
        table.append([what, others.provider, count, "-", "-", price, "-", "-", why, "never"])
    if table:
        click.echo("\n" + output.table(TITLES, table, right=RIGHT))
    spend = found.unexplained_usd
    text = "no cloud here tells its bill" if spend is None else f"{money(spend)} $"
    click.echo(f"\n{_total(findings)}       UNEXPLAINED SPEND (7 d, by the clouds' bills)  {text}")
    for past in resolved:
        ago = output.since(past["resolved_at"], now=now)
        about = past["resource_id"] or past["claim_uid"]
        click.echo(
            f"resolved {ago} ago: {past['kind']} {about}"
            f" on {past['provider']}, {past['resolved_as']}, ${money(past['cost_so_far'])}"
        )


def row(one: "Finding", now: datetime) -> list[str]:
    from app.sweep.explain import next_words

    return [
        one.kind.value,
        one.provider,
        str(one.resource_id or (one.claim_uid or "")[:8] or "-"),
        output.since(one.since, now=now),
        str(one.sightings),
        usd(one.usd_per_hour),
        money(one.cost_so_far),
        str(one.owner),
        one.why,
        next_words(one),
    ]


def _total(findings: Sequence["Finding"]) -> str:
    from decimal import Decimal

    hourly = sum((one.usd_per_hour for one in findings if one.usd_per_hour is not None), Decimal(0))
    so_far = sum((one.cost_so_far for one in findings if one.cost_so_far is not None), Decimal(0))
    unpriced = sum(one.usd_per_hour is None and one.resource_id is not None for one in findings)
    text = f"TOTAL OURS  {len(findings)} finding{'' if len(findings) == 1 else 's'}"
    text += f" · {usd(hourly)} $/h · {money(so_far)} $ so far"
    return text + (f" · {unpriced} of unknown price" if unpriced else "")


def lists(facts: "Facts") -> str:
    words = []
    for (provider, account), places in sorted(facts.places.items()):
        name = provider if account == "default" else f"{provider}/{account}"
        bad = [place for place in places if place.unknown]
        if not places:
            words.append(f"{name} NEVER LISTED")
        elif bad:
            words.append(f"{name} INCOMPLETE ({bad[0].unknown})")
        else:
            words.append(f"{name} ok" + (f" ({len(places)} regions)" if len(places) > 1 else ""))
    return " · ".join(words) or "none"


def lists_plain(facts: "Facts") -> list[dict[str, Any]]:
    return [
        {
            "provider": one.provider,
            "account": one.account,
            "region": one.region,
            "complete": one.unknown is None,
            "reason": one.unknown,
            "machines": one.machines,
        }
        for places in facts.places.values()
        for one in places
    ]


def plain(found: "Audit", findings: Sequence["Finding"], resolved: Sequence[Any]) -> dict[str, Any]:
    facts = found.facts
    return {
        "installation": facts.installation,
        "claims": found.cluster,
        "held": facts.mode.held,
        "reportOnly": facts.mode.report,
        "lists": lists_plain(facts),
        "unexplainedUsd": found.unexplained_usd,
        "boundSeconds": {f"{key[0]}/{key[1]}": bounds.orphan_s for key, bounds in facts.bounds.items()},
        "findings": [
            {
                "id": one.finding_id,
                "kind": one.kind.value,
                "provider": one.provider,
                "account": one.account,
                "region": one.region,
                "resource": one.resource_id,
                "claim": one.claim_uid,
                "state": one.state,
                "since": one.since,
                "sightings": one.sightings,
                "usdPerHour": one.usd_per_hour,
                "costSoFar": one.cost_so_far,
                "owner": {"namespace": one.owner.namespace, "pod": one.owner.pod, "gone": one.owner.gone},
                "why": one.why,
                "next": one.next.value,
                "by": one.by.value,
                "blockedBy": one.blocked_by,
                "eligibleAt": one.eligible_at,
                "rules": [
                    {"rule": rule.name, "passed": rule.passed, "detail": rule.detail, "until": rule.until}
                    for rule in one.rules
                ],
            }
            for one in findings
        ],
        "notOurs": [
            {
                "provider": one.provider,
                "account": one.account,
                "installation": one.installation,
                "machines": one.machines,
                "usdPerHour": one.usd_per_hour,
            }
            for one in found.judgement.not_ours
        ],
        "resolved": [
            {
                "id": row["id"],
                "kind": row["kind"],
                "provider": row["provider"],
                "resource": row["resource_id"],
                "resolvedAt": row["resolved_at"],
                "as": row["resolved_as"],
                "cost": row["cost_so_far"],
            }
            for row in resolved
        ],
    }


def seen(one: Any) -> dict[str, Any]:
    return {
        "provider": one.ref.provider,
        "account": one.ref.account,
        "region": one.ref.region,
        "resource": one.ref.resource_id,
        "state": one.state.value,
        "createdAt": one.provider_created_at,
        "usdPerHour": one.usd_per_hour,
        "claim": one.identity.claim_uid,
        "attempt": one.identity.attempt,
        "sequence": one.identity.sequence,
    }


def csv_text(table: Sequence[Sequence[str]]) -> str:
    import csv
    import io

    target = io.StringIO()
    csv.writer(target, lineterminator="\n").writerows(table)
    return target.getvalue().rstrip("\n")


def usd(amount: Any) -> str:
    return "unknown" if amount is None else f"{amount:.2f}"


def money(amount: Any) -> str:
    return "-" if amount is None else f"{amount:.2f}"


def detail(detail: dict[str, Any]) -> str:
    given = ((key, value) for key, value in detail.items() if key != "evidence")
    words = [f"{key}={value}" for key, value in given if value not in (None, "")]
    return f": {', '.join(words)}" if words else ""
