"""What machines leave behind: keys, templates, groups, logins, volumes. Judged like machines, graced longer.

Only a name that our codec made is ever a finding. A claim's own part goes with its claim; one that claims
share goes when the cloud says that nobody uses it, or, where it does not say, when nothing of ours is left in
the account at all. Data is not compute: a volume that was made for one claim goes after it only where the
settings say so (``sweep_volumes``), else a person is told what it costs; any other is never a finding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.inventory.identity import parse, parse_part
from app.sweep.judge import sane
from app.sweep.model import (
    AccountKey,
    By,
    Facts,
    Finding,
    Kind,
    Next,
    Owner,
    PlaceFact,
    Rule,
    cost_so_far,
)
from app.sweep.rails import remembered, under_ceiling
from providers.base import ClaimUid, MachineState, ResourceId, usd_per_hour
from providers.capabilities import Part, PartKind

_NOBODY = Owner()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartList:
    """One answer for the parts of one list region."""

    key: AccountKey
    region: str
    parts: tuple[Part, ...]
    unknown: str | None


def judge_parts(facts: Facts, lists: Iterable[PartList]) -> tuple[Finding, ...]:
    """Every part of ours that nothing needs any more. Pure, as `app.sweep.judge`."""
    lists = tuple(lists)
    places: dict[AccountKey, tuple[PlaceFact, ...]] = {}
    for listed in lists:
        provider, account = listed.key
        place = PlaceFact(provider=provider, account=account, region=listed.region, unknown=listed.unknown)
        places[listed.key] = (*places.get(listed.key, ()), place)
    facts = replace(facts, places=places)
    shown = {
        machine.identity.claim_uid
        for machine in facts.machines
        if machine.identity is not None and machine.state is not MachineState.GONE
    }
    findings, ours = [], 0
    for listed in lists:
        if listed.key not in facts.bounds:
            continue
        for part in listed.parts:
            whose = _whose(part, facts, shown, listed.key)
            if whose is None:
                continue
            ours += 1
            why, uid = whose
            if why is not None:
                findings.append(_finding(part, facts, why=why, uid=uid))
    return tuple(under_ceiling([remembered(one, facts) for one in findings], facts, known=ours))


def part_id(part: Part) -> ResourceId:
    """``kind/id``: an id of a cloud is unique only within its kind."""
    return ResourceId(f"{part.kind.value}/{part.ref.resource_id}")


def _whose(
    part: Part, facts: Facts, shown: set[ClaimUid], key: AccountKey
) -> tuple[str | None, ClaimUid | None] | None:
    """None: not ours. Else why nothing needs it (None: something does, or may), and the claim it is of."""
    own = parse(part.identity)
    if own is not None:
        if own.installation != facts.installation:
            return None
        uid, rental = own.claim_uid, facts.rentals.get(own.claim_uid)
        over = rental is None or (rental.state == "ended" and not rental.unsettled)
        left = over and uid not in facts.claims and uid not in shown and part.in_use is not True
        return ("its claim and its machine are gone" if left else None), uid
    shared = parse_part(part.identity)
    if shared is None or shared.installation != facts.installation:
        return None
    if part.kind is PartKind.VOLUME or part.in_use is True:
        return None, None
    if part.in_use is False:
        return "nothing uses it", None
    busy = any((one.provider, one.account) == key for one in facts.claims.values()) or any(
        (one.provider, one.account) == key and one.state != "ended" for one in facts.rentals.values()
    )
    return (None if busy else "nothing of ours is left in the account"), None


def _finding(part: Part, facts: Facts, *, why: str, uid: ClaimUid | None) -> Finding:
    ref, said = part.ref, part.created_at
    resource = (ref.provider, ref.account, ref.resource_id)
    key = f"{Kind.LEFTOVER_PART}|{ref.provider}|{ref.account}|{part_id(part)}"
    memory = facts.memory.get(key)
    first = memory.first_seen_at if memory is not None else facts.now
    since = said if said is not None and sane(said, facts.now) else first
    usd = usd_per_hour(part.meters)
    found = Finding(
        kind=Kind.LEFTOVER_PART,
        provider=ref.provider,
        account=ref.account,
        region=ref.region,
        resource_id=part_id(part),
        claim_uid=uid,
        attempt=None,
        raw_identity=part.identity,
        state=part.kind.value,
        why=why,
        owner=facts.owners.get(uid, _NOBODY) if uid is not None else _NOBODY,
        by=By.PERSON if part.kind is PartKind.VOLUME and not facts.limits.volumes else By.SWEEP,
        next=Next.REPORT,
        since=since,
        # What claims share may be old and only now without a use: its grace begins when that is first seen.
        counted_from=since if uid is not None else first,
        provider_created_at=said,
        usd_per_hour=usd,
        cost_so_far=cost_so_far(usd, since=since, now=facts.now),
    )
    protection = facts.protections.get(resource) or facts.protections.get((*resource[:2], part_id(part)))
    if protection is not None and protection.until > facts.now:
        rule = Rule(name="S19 protected", passed=False, detail=protection.reason, until=protection.until)
        return replace(
            found, next=Next.PROTECT, rules=(rule,), blocked_by="protect", eligible_at=protection.until
        )
    return found
