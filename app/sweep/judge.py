"""The judgement: facts in, findings out. Pure: no clock, no I/O, nothing remembered between two calls.

What is always true, whatever the facts are (hypothesis tries to break it):

* a machine without an identity of this installation is never a finding that ends it, and one that carries
  another installation's never a finding at all;
* a claim with an unsettled attempt is never a finding;
* nothing is to be ended that a rail speaks against; only the ceiling and report mode yield to an approval;
* only machines that no row knows are the sweep's to end. Where a row knows the claim, provisioning ends the
  machine by design section 5, and the finding says so: one way in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from app.sweep.model import (
    AccountKey,
    Bounds,
    By,
    ClaimFact,
    Facts,
    Finding,
    Judgement,
    Kind,
    Next,
    NotOurs,
    Owner,
    RentalFact,
    Rule,
    RunFact,
    Sighting,
    cost_so_far,
)
from app.sweep.rails import ceiling_of, remembered, under_ceiling
from providers.base import ClaimUid, MachineState

SANE_AFTER = timedelta(days=3650)  # a creation time before this is an epoch or nonsense
SKEW = timedelta(minutes=10)  # a cloud's clock may be ahead of ours by so much, and no more


def judge(facts: Facts) -> Judgement:
    """Every finding, the worst first, and how many machines of others there are."""
    known_accounts = facts.bounds.keys()
    incomplete = tuple(place for places in facts.places.values() for place in places if place.unknown)
    findings: list[Finding] = []
    others: dict[tuple[str, str, str | None], list[Decimal | None]] = defaultdict(list)
    ours = 0
    shown: set[tuple[str, str, str]] = set()
    shown_claims: set[ClaimUid] = set()
    for machine in facts.machines:
        shown.add(machine.key)
        if machine.state is MachineState.GONE:
            continue
        key = (machine.ref.provider, machine.ref.account)
        identity = machine.identity
        if identity is not None and identity.installation == facts.installation:
            ours += 1
            shown_claims.add(identity.claim_uid)
            if key in known_accounts and (found := _of_ours(machine, facts)) is not None:
                findings.append(found)
        elif identity is not None and machine.key not in facts.runs:
            others[(*key, identity.installation)].append(machine.usd_per_hour)
        elif machine.key in facts.runs or machine.was_ours is not None:
            if (found := _damaged(machine, facts)) is not None:
                findings.append(found)
        else:
            others[(*key, None)].append(machine.usd_per_hour)
    findings += _of_claims(facts, shown_claims)
    findings += _of_rentals(facts, shown_claims)
    findings += _of_runs(facts, shown)
    findings = under_ceiling([remembered(one, facts) for one in findings], facts, known=ours)
    findings.sort(key=lambda one: (_WORST.index(one.kind), one.since, one.key))
    blocked = Counter(one.blocked_by for one in findings if one.blocked_by is not None)
    return Judgement(
        findings=tuple(findings),
        not_ours=tuple(
            NotOurs(
                provider=provider,
                account=account,
                installation=installation,
                machines=len(prices),
                usd_per_hour=_sum(prices),
            )
            for (provider, account, installation), prices in sorted(
                others.items(), key=lambda item: tuple(part or "" for part in item[0])
            )
        ),
        ours=ours,
        incomplete=incomplete,
        blocked=dict(blocked),
        ceiling=ceiling_of(facts, known=ours),
    )


_WORST = (
    Kind.PROVIDER_REMOVED,
    Kind.NO_CLAIM,
    Kind.DUPLICATE,
    Kind.STALE_ATTEMPT,
    Kind.TERMINATING_SLOW,
    Kind.DAMAGED,
    Kind.STOPPED_BILLING,
    Kind.CLAIM_WITHOUT_MACHINE,
    Kind.CLAIM_WITHOUT_POD,
    Kind.STUCK,
    Kind.RENTAL_ONLY,
    Kind.RUN_OPEN,
    Kind.LEFTOVER_PART,
)


# --- machines --------------------------------------------------------------------------------------


def _of_ours(machine: Sighting, facts: Facts) -> Finding | None:
    """What is wrong with one machine that carries our identity; None if nothing is."""
    assert machine.identity is not None
    uid = machine.identity.claim_uid
    claim, rental = facts.claims.get(uid), facts.rentals.get(uid)
    run = facts.runs.get(machine.key)
    bounds = facts.bounds[(machine.ref.provider, machine.ref.account)]
    if rental is None:
        if claim is not None:
            return None  # its own room comes to it, by the mark on the claim
        return _finding(Kind.NO_CLAIM, machine, facts, why="no claim and no row knows it", by=By.SWEEP)
    if rental.unsettled:
        return None
    match rental.state:
        case "ended" if rental.ended_at is None or rental.ended_at >= machine.listed_at:
            return None  # the list is older than the end
        case "ended":
            return _finding(
                Kind.NO_CLAIM, machine, facts, why="it came after its rental had ended", by=By.PROVISIONING
            )
        case "ending":
            return _slow(machine, facts, rental, run, bounds)
        case "live" if machine.ref.resource_id != rental.resource_id:
            if rental.attempt is not None and machine.identity.attempt < rental.attempt:
                why = f"of attempt {machine.identity.attempt}, attempt {rental.attempt} is the rental's"
                return _finding(Kind.STALE_ATTEMPT, machine, facts, why=why, by=By.PROVISIONING)
            why = f"beside {rental.resource_id}, the rental's own"
            return _finding(Kind.DUPLICATE, machine, facts, why=why, by=By.PROVISIONING)
    if claim is None and facts.mode.claims_unread is None:
        return _finding(
            Kind.NO_CLAIM, machine, facts, why="its claim is gone, its rental not", by=By.PROVISIONING
        )
    if machine.state is MachineState.EXITED and machine.usd_per_hour and run is not None and run.exited_at:
        stopped_s = (facts.now - run.exited_at).total_seconds()
        if stopped_s > bounds.ending_s:
            why = "its workload is over, and it still costs"
            return _finding(Kind.STOPPED_BILLING, machine, facts, why=why, by=By.CLAIMS)
    return None


def _slow(
    machine: Sighting, facts: Facts, rental: RentalFact, run: RunFact | None, bounds: Bounds
) -> Finding | None:
    """A machine in release, if that takes longer than it should."""
    asked = run.terminate_asked_at if run is not None else None
    began = asked or rental.ending_at
    if began is None or (facts.now - began).total_seconds() <= bounds.ending_s:
        return None
    why = "a terminate was accepted, and it is still there" if asked else "no terminate has been accepted yet"
    return _finding(Kind.TERMINATING_SLOW, machine, facts, why=why, by=By.PROVISIONING)


def _damaged(machine: Sighting, facts: Facts) -> Finding | None:
    """Recorded as ours, and its name says otherwise now: somebody edited it, or the cloud cut it."""
    run = facts.runs.get(machine.key)
    uid = run.uid if run is not None else machine.was_ours
    rental = facts.rentals.get(uid) if uid is not None else None
    if rental is not None and rental.unsettled:
        return None
    if run is not None and run.gone_at is not None and run.gone_at >= machine.listed_at:
        return None
    known = run is not None and rental is not None and rental.state != "ended"
    why = "recorded as ours, and its identity cannot be read any more"
    return _finding(Kind.DAMAGED, machine, facts, why=why, by=By.PROVISIONING if known else By.PERSON)


def _finding(kind: Kind, machine: Sighting, facts: Facts, *, why: str, by: By) -> Finding:
    """The finding, protected if somebody said so. Whose it is says its identity, where that is ours."""
    run = facts.runs.get(machine.key)
    ours = machine.identity if kind is not Kind.DAMAGED else None
    uid = ours.claim_uid if ours else run.uid if run else machine.was_ours
    said = machine.provider_created_at
    since = said if said is not None and sane(said, facts.now) else machine.first_seen_at
    usd = machine.usd_per_hour if machine.usd_per_hour is not None or run is None else run.usd_per_hour
    found = Finding(
        kind=kind,
        provider=machine.ref.provider,
        account=machine.ref.account,
        region=machine.ref.region,
        resource_id=machine.ref.resource_id,
        claim_uid=uid,
        attempt=ours.attempt if ours else None,
        raw_identity=machine.raw_identity,
        state=machine.state.value,
        why=why,
        owner=_owner(uid, facts, run),
        by=by,
        next=Next.REPORT,
        since=since,
        counted_from=counted_from(machine, facts.now),
        provider_created_at=machine.provider_created_at,
        usd_per_hour=usd,
        cost_so_far=cost_so_far(usd, since=since, now=facts.now),
    )
    protection = facts.protections.get(machine.key)
    if protection is not None and protection.until > facts.now:
        kept = f"{protection.reason} ({protection.by})"
        rule = Rule(name="S19 protected", passed=False, detail=kept, until=protection.until)
        if by in (By.SWEEP, By.PERSON):
            return replace(
                found, next=Next.PROTECT, rules=(rule,), blocked_by="protect", eligible_at=protection.until
            )
    return found


def sane(said: datetime | None, now: datetime) -> bool:
    """Whether a cloud's word on a creation can be one: in the past, and no epoch."""
    return said is not None and now - SANE_AFTER < said <= now + SKEW


def counted_from(machine: Sighting, now: datetime) -> datetime:
    """When its grace begins: the cloud's word where it is sane, else our first sight.

    A cloud's clock may be wrong by `SKEW` either way, so its word counts only from so much later on.
    """
    said = machine.provider_created_at
    if said is None or not sane(said, now):
        return machine.first_seen_at
    return min(said + SKEW, machine.first_seen_at)


def _owner(uid: ClaimUid | None, facts: Facts, run: RunFact | None) -> Owner:
    if uid is None:
        return Owner()
    if (claim := facts.claims.get(uid)) is not None:
        return Owner(namespace=claim.namespace, pod=claim.pod, gone=claim.pod_exists is False)
    if (rental := facts.rentals.get(uid)) is not None and rental.pod:
        return Owner(namespace=rental.namespace, pod=rental.pod, gone=True)
    if run is not None and run.pod:
        return Owner(namespace=run.namespace, pod=run.pod, gone=True)
    return facts.owners.get(uid, Owner())


# --- claims, rentals and runs without a machine -------------------------------------------------------


def _of_claims(facts: Facts, shown: set[ClaimUid]) -> Iterable[Finding]:
    for uid, claim in facts.claims.items():
        key, rental = (claim.provider, claim.account), facts.rentals.get(uid)
        if rental is not None and rental.unsettled:
            continue
        if key not in facts.bounds:
            yield _bare(
                Kind.PROVIDER_REMOVED,
                facts,
                claim=claim,
                why=f"provider {claim.provider}/{claim.account} is not configured, its claim is here",
                by=By.PERSON,
            )
            continue
        bounds, age_s = facts.bounds[key], (facts.now - claim.created_at).total_seconds()
        if claim.deleting:
            continue
        machine = (*key, rental.resource_id) if rental is not None and rental.resource_id else None
        run = facts.runs.get(machine) if machine is not None else None
        live = rental is not None and rental.state == "live" and uid not in shown and _whole(key, facts)
        if live and ((run is not None and run.gone_at is not None) or machine in facts.lost):
            why = "its machine is gone"
            kind = Kind.CLAIM_WITHOUT_MACHINE
            yield _bare(kind, facts, claim=claim, rental=rental, why=why, by=By.CLAIMS)
        elif claim.pod_exists is False and age_s > bounds.launch_s:
            why = "its Pod is gone, the claim not"
            yield _bare(Kind.CLAIM_WITHOUT_POD, facts, claim=claim, why=why, by=By.CLAIMS)
        elif (rental is None or rental.state == "open") and uid not in shown and age_s > bounds.launch_s:
            why = "nothing was rented for it within the launch bound"
            yield _bare(Kind.STUCK, facts, claim=claim, why=why, by=By.CLAIMS)


def _of_rentals(facts: Facts, shown: set[ClaimUid]) -> Iterable[Finding]:
    for uid, rental in facts.rentals.items():
        key = (rental.provider, rental.account)
        if uid in facts.claims or rental.state == "ended" or rental.unsettled:
            continue
        if key not in facts.bounds:
            why = (
                f"provider {rental.provider}/{rental.account} is not configured, its rental is {rental.state}"
            )
            yield _bare(Kind.PROVIDER_REMOVED, facts, rental=rental, why=why, by=By.PERSON)
            continue
        bounds = facts.bounds[key]
        began, most_s = rental.created_at, bounds.grace_s
        if rental.state == "ending" and rental.ending_at is not None:
            began, most_s = rental.ending_at, bounds.ending_s
        old = (facts.now - began).total_seconds() > most_s
        if rental.resource_id is not None and (*key, rental.resource_id) not in facts.lost:
            continue  # its machine is listed, or was a moment ago: the end is under way
        if old and uid not in shown and facts.mode.claims_unread is None and _whole(key, facts):
            why = f"a rental in state {rental.state}, with neither claim nor machine"
            yield _bare(Kind.RENTAL_ONLY, facts, rental=rental, why=why, by=By.PROVISIONING)


def _of_runs(facts: Facts, shown: set[tuple[str, str, str]]) -> Iterable[Finding]:
    for key, run in facts.runs.items():
        rental = facts.rentals.get(run.uid)
        account = (run.ref.provider, run.ref.account)
        if run.gone_at is not None or key in shown or account not in facts.bounds:
            continue
        if rental is not None and rental.unsettled:
            continue
        if (rental is None or rental.state == "ended") and key in facts.lost and _whole(account, facts):
            since = run.accepted_at or run.provider_created_at or facts.now
            yield Finding(
                kind=Kind.RUN_OPEN,
                provider=run.ref.provider,
                account=run.ref.account,
                region=run.ref.region,
                resource_id=run.ref.resource_id,
                claim_uid=run.uid,
                attempt=None,
                raw_identity=None,
                state="absent",
                why="its run is open, and no machine is there",
                owner=_owner(run.uid, facts, run),
                by=By.PROVISIONING,
                next=Next.REPORT,
                since=since,
                usd_per_hour=run.usd_per_hour,
            )


def _bare(
    kind: Kind,
    facts: Facts,
    *,
    why: str,
    by: By,
    claim: ClaimFact | None = None,
    rental: RentalFact | None = None,
) -> Finding:
    """A finding about a claim or a rental that no machine goes with."""
    about = claim or rental
    assert about is not None
    return Finding(
        kind=kind,
        provider=about.provider,
        account=about.account,
        region="",
        resource_id=None,
        claim_uid=about.uid,
        attempt=None,
        raw_identity=None,
        state=rental.state if rental is not None else "none",
        why=why,
        owner=_owner(about.uid, facts, None),
        by=by,
        next=Next.REPORT,
        since=about.created_at,
    )


def _whole(key: AccountKey, facts: Facts) -> bool:
    """Every list of the account was complete."""
    places = facts.places.get(key, ())
    return bool(places) and all(place.unknown is None for place in places)


def _sum(prices: list[Decimal | None]) -> Decimal | None:
    """None when any of them is unknown: a sum that leaves something out would look like the whole."""
    total = Decimal(0)
    for price in prices:
        if price is None:
            return None
        total += price
    return total
