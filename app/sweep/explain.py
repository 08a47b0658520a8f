"""Why a machine is, or is not, a finding: rule by rule, like a query plan. Pure."""

from app.sweep.model import Facts, Finding, Rule, Sighting
from providers.base import MachineState


def explain(machine: Sighting, facts: Facts, findings: tuple[Finding, ...]) -> tuple[list[Rule], str]:
    """What was looked at in order, and the verdict."""
    rules = [_identity(machine, facts)]
    found = next((one for one in findings if one.resource_id == machine.ref.resource_id), None)
    uid = found.claim_uid if found is not None else None
    if uid is None and machine.identity is not None and machine.identity.installation == facts.installation:
        uid = machine.identity.claim_uid
    run = facts.runs.get(machine.key)
    uid = uid or (run.uid if run is not None else machine.was_ours)
    if uid is not None:
        claim, rental = facts.claims.get(uid), facts.rentals.get(uid)
        rules.append(
            Rule(
                name="claim",
                passed=claim is not None,
                detail=f"{claim.name} of Pod {claim.namespace}/{claim.pod}" if claim else f"{uid} is gone",
            )
        )
        rules.append(
            Rule(
                name="rental",
                passed=rental is not None and rental.state != "ended",
                detail=f"{rental.state}, its machine is {rental.resource_id or 'none yet'}"
                if rental
                else "no row knows the claim",
            )
        )
        unsettled = rental is not None and rental.unsettled
        rules.append(
            Rule(
                name="settled",
                passed=not unsettled,
                detail="an order may have been taken, and is looked for: never a finding"
                if unsettled
                else "no order is unknown",
            )
        )
    if run is not None:
        gone = f", gone since {run.gone_at:%Y-%m-%d %H:%M} UTC" if run.gone_at else ""
        rules.append(Rule(name="run", passed=run.gone_at is None, detail=f"recorded by its id{gone}"))
    if found is None:
        return rules, _fine(machine, facts)
    rules += found.rules
    return rules, f"{found.kind}: {found.why}; {next_words(found)}"


def _identity(machine: Sighting, facts: Facts) -> Rule:
    identity = machine.identity
    if identity is None:
        raw = "none" if machine.raw_identity is None else repr(machine.raw_identity)
        return Rule(name="S20 ours", passed=False, detail=f"its name is no identity of ours: {raw}")
    ours = identity.installation == facts.installation
    text = f"installation {identity.installation}, claim {identity.claim_uid}, attempt {identity.attempt}"
    return Rule(name="S20 ours", passed=ours, detail=text + ("" if ours else ": another installation's"))


def _fine(machine: Sighting, facts: Facts) -> str:
    if machine.state is MachineState.GONE:
        return "no finding: the cloud shows it only as history"
    if machine.identity is None and machine.key not in facts.runs and machine.was_ours is None:
        return "never touched: it is not ours"
    if machine.identity is not None and machine.identity.installation != facts.installation:
        return f"never touched: it is installation {machine.identity.installation}'s"
    return "no finding: it is as it should be"


def next_words(found: Finding) -> str:
    """What happens now, in a few words."""
    at = f"{found.eligible_at:%H:%M:%S} UTC" if found.eligible_at is not None else ""
    match found.next:
        case "terminate":
            return "ended at the next sweep"
        case "wait":
            return f"ended at {at} ({found.blocked_by})"
        case "blocked":
            return f"blocked by {found.blocked_by}"
        case "protect":
            return f"protected until {found.eligible_at:%Y-%m-%d %H:%M} UTC"
    return {
        "provisioning": "provisioning ends it",
        "claims": "its claim's end ends it",
        "person": "look at it",
    }.get(found.by.value, "reported")
