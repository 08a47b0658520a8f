"""The rails: what speaks against ending something now, one by one, and the ceiling for all of them.

Pure. The numbers S… are those of `nebula orphans explain` and docs/orphans.md. A rail with ``until`` is met
by time alone; any other needs something to change.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from app.sweep.model import By, Facts, Finding, Kind, Memory, Next, Rule

CEILING = "ceiling"


def remembered(found: Finding, facts: Facts) -> Finding:
    """With what earlier sweeps have seen of it, and with the rails held against it."""
    memory = facts.memory.get(found.key)
    same = memory is not None and memory.mark == found.mark
    if memory is not None:
        found = replace(
            found,
            finding_id=memory.finding_id,
            first_seen_at=memory.first_seen_at,
            sightings=memory.sightings + 1 if same else 1,
        )
    else:
        found = replace(found, first_seen_at=facts.now)
    if found.next is not Next.REPORT or found.by is not By.SWEEP:
        return found
    rules = tuple(rails(found, facts, memory if same else None))
    failed = [rule for rule in rules if not rule.passed]
    if not failed:
        return replace(found, rules=rules, next=Next.TERMINATE, eligible_at=facts.now)
    lasting = next((rule for rule in failed if rule.until is None), None)
    if lasting is not None:
        return replace(found, rules=rules, next=Next.BLOCKED, blocked_by=_word(lasting))
    until = max(rule.until for rule in failed if rule.until is not None)
    last = max(failed, key=lambda rule: rule.until or facts.now)
    return replace(found, rules=rules, next=Next.WAIT, blocked_by=_word(last), eligible_at=until)


def _word(rule: Rule) -> str:
    return rule.name.split(" ", 1)[1]


def rails(found: Finding, facts: Facts, memory: Memory | None) -> Iterable[Rule]:
    """Every rail for ending one machine, in the order in which `nebula explain` shows them.

    ``memory`` is the open finding, None when reason or state have changed since it was last seen.
    """
    mode, now = facts.mode, facts.now
    bounds = facts.bounds[(found.provider, found.account)]
    approved = approved_now(memory, facts)
    yield Rule(name="S20 ours", passed=True, detail=f"its identity names installation {facts.installation}")
    unknown = [
        place
        for place in facts.places.get((found.provider, found.account), ())
        if place.unknown and place.region in ("", found.region)
    ]
    lists = facts.places.get((found.provider, found.account), ())
    yield Rule(
        name="S2 list",
        passed=bool(lists) and not unknown,
        detail=unknown[0].unknown or "" if unknown else "complete" if lists else "never listed",
    )
    yield _off("S13 fence", mode.held, "no row is missing")
    yield _off("S4 claims", mode.claims_unread, "the API server was asked after the list: no such claim")
    yield _off("S12 leader", mode.not_leader, "we lead")
    born, grace = found.counted_from or found.since, timedelta(seconds=bounds.grace_s)
    if found.kind is Kind.LEFTOVER_PART:
        grace = timedelta(seconds=bounds.part_grace_s)
    old_at = born + grace
    yield Rule(
        name="S5 grace",
        passed=now >= old_at,
        detail=f"{_age(now - born)} old, the grace is {_age(grace)}",
        until=None if now >= old_at else old_at,
    )
    again_at = (memory.marked_at if memory else now) + timedelta(seconds=bounds.interval_s)
    twice = memory is not None and now >= again_at
    yield Rule(
        name="S7 sightings",
        passed=twice,
        detail=f"seen {found.sightings} times like this",
        until=None if twice else max(again_at, now),
    )
    if mode.report is not None:
        yield Rule(
            name="S11 report",
            passed=approved,
            detail=f"{mode.report}, and approved" if approved else mode.report,
        )
    if memory is not None and memory.executed_at is not None:
        next_at = memory.executed_at + timedelta(seconds=min(3600.0, 2.0**memory.tries * bounds.interval_s))
        yield Rule(
            name="S16 back-off",
            passed=now >= next_at,
            detail=f"ended {memory.tries} times before",
            until=None if now >= next_at else next_at,
        )


def approved_now(memory: Memory | None, facts: Facts) -> bool:
    """Whether a person's approval of this finding is young enough to count."""
    if memory is None or memory.approved_at is None:
        return False
    return (facts.now - memory.approved_at).total_seconds() <= facts.limits.approval_s


def under_ceiling(findings: list[Finding], facts: Facts, *, known: int) -> list[Finding]:
    """All or none: above the ceiling nothing is ended that no person has approved.

    Those still in their grace count too. Else a hundred at once would be ended five at a time.
    """
    ceiling = ceiling_of(facts, known=known)
    candidates = [
        one
        for one in findings
        if one.by is By.SWEEP and one.next in (Next.TERMINATE, Next.WAIT, Next.BLOCKED)
    ]
    unapproved = [one for one in candidates if not approved_now(facts.memory.get(one.key), facts)]
    over = len(unapproved) > ceiling
    detail = f"{len(unapproved)} to end, the ceiling of one sweep is {ceiling}"
    result = []
    for one in findings:
        if one.by is not By.SWEEP or not one.rules or one.next is Next.PROTECT:
            result.append(one)
            continue
        mine = over and not approved_now(facts.memory.get(one.key), facts)
        rule = Rule(name=f"S9 {CEILING}", passed=not mine, detail=detail if over else f"within {ceiling}")
        one = replace(one, rules=(*one.rules, rule))
        if mine and one.next is Next.TERMINATE:
            one = replace(one, next=Next.BLOCKED, blocked_by=CEILING, eligible_at=None)
        result.append(one)
    return result


def _off(name: str, why_not: str | None, fine: str) -> Rule:
    return Rule(name=name, passed=why_not is None, detail=why_not or fine)


def _age(span: timedelta) -> str:
    total = max(0, int(span.total_seconds()))
    return f"{total}s" if total < 120 else f"{total // 60}m"


def ceiling_of(facts: Facts, *, known: int) -> int:
    """How many of what is known one sweep may end without a person's word."""
    return max(facts.limits.machines, int(facts.limits.share * known))
