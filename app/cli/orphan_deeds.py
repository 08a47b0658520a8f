"""What the commands about orphans change: approvals, protections, claims let go of, machines adopted.

None of it asks a cloud for anything but a look. Rows are changed by the same compare-and-set as the leader's,
under the epoch in force; a leader that comes meanwhile makes the change fail, and nothing is written.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.inventory.accounts import Accounts
from app.inventory.identity import parse
from app.kube import paths
from app.kube.auth import NoCluster
from app.kube.claims import UnreadableClaim, claim_spec
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.kube.installation import check_installation
from app.provisioning.memory import meters_json
from app.provisioning.model import ClaimSpec
from app.settings import Settings
from app.store import findings, rentals, rounds
from app.store.engine import begin, database_now
from app.store.installation import Installation
from app.store.installation import get as installation_of
from app.store.rentals import RunFacts
from app.sweep.audit import Audit
from app.sweep.audit import audit as look
from app.sweep.model import By, Finding, Kind, Next
from app.sweep.trail import sighted
from app.vnode.status import is_leaving, is_over
from providers.base import Machine, ProviderError, Ref, ResourceId, usd_per_hour

POLL_S = 0.2
CLUSTER_S = 10.0
LISTED_LATELY = timedelta(minutes=10)  # many rounds of a leader, however slowly it lists


# --- sweep --execute -------------------------------------------------------------------------------------


def in_plan(one: Finding) -> bool:
    """Whether an approval would concern it: the sweep's own, and nobody protects it."""
    return one.by is By.SWEEP and one.next is not Next.PROTECT


def plan_of(found: Audit) -> str:
    """A plan's name: when it was made, and what it would end."""
    return f"{found.facts.now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{_digest(found)}"


def _digest(found: Audit) -> str:
    keys = sorted(one.key for one in found.findings if in_plan(one))
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:8]


async def approve_plan(
    settings: Settings,
    engine: AsyncEngine,
    found: Audit,
    *,
    confirm: str,
    plan: str | None,
    by: str,
    wait_s: float,
    say: Callable[[str], Any],
) -> int:
    """Approve what was found, and watch what becomes of it; the exit code.

    Raises:
        click.ClickException: nothing was approved; why.
    """
    _check_installation(confirm, found.facts.installation)
    if plan is not None:
        _check_plan(plan, found, at_most=timedelta(seconds=settings.sweep_approval_s))
    if found.facts.mode.held is not None:
        raise click.ClickException(
            f"sweeps are held: {found.facts.mode.held}; once every machine is accounted for:"
            " nebula hold release --yes"
        )
    if not found.facts.places:
        say("note: no providers are given (--providers or NEBULA_PROVIDERS): no cloud was asked")
    elif found.incomplete:
        bad = [place for places in found.facts.places.values() for place in places if place.unknown]
        say(f"note: {bad[0].provider} was not listed whole ({bad[0].unknown}): nothing is ended there")
    chosen = [one for one in found.findings if in_plan(one)]
    if not chosen:
        say("nothing is to be ended")
        return 0
    async with begin(engine) as conn:
        ids = [one.finding_id for one in chosen if one.finding_id is not None]
        fresh = [sighted(one, found.facts.installation) for one in chosen if one.finding_id is None]
        ids += (await findings.sighted(conn, fresh, before={})).values()
        approved = await findings.approve(conn, ids, by=by)
    minutes = settings.sweep_approval_s / 60
    say(f"approved by {by}: {len(approved)} findings, for {minutes:.0f} minutes; the leader ends them")
    return await _watch(engine, approved, wait_s=wait_s, say=say)


async def _watch(engine: AsyncEngine, ids: list[int], *, wait_s: float, say: Callable[[str], Any]) -> int:
    deadline, told = time.monotonic() + wait_s, set[int]()
    query = text("""
        select id, kind, provider, resource_id, decision, blocked_by, provider_response, resolved_as,
            cost_so_far
        from orphan_finding where id = any(:ids) order by id
    """)
    while True:
        async with begin(engine) as conn:
            rows = list((await conn.execute(query, {"ids": ids})).mappings())
        for row in rows:
            if row["resolved_as"] is not None and row["id"] not in told:
                told.add(row["id"])
                usd = "unknown" if row["cost_so_far"] is None else f"${row['cost_so_far']:.4f}"
                about = f"finding {row['id']}: {row['resource_id']} on {row['provider']}"
                say(f"{about}: {row['resolved_as']}, cost {usd}")
        if len(told) == len(ids):
            return 0
        if time.monotonic() > deadline:
            for row in rows:
                if row["id"] not in told:
                    state = row["provider_response"] or row["blocked_by"] or row["decision"]
                    say(f"finding {row['id']}: {row['resource_id']} on {row['provider']}: not yet ({state})")
            return 2
        await asyncio.sleep(POLL_S)


def _check_plan(plan: str, found: Audit, *, at_most: timedelta) -> None:
    made, _, digest = plan.partition("-")
    try:
        at = datetime.strptime(made, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise click.UsageError(f"--plan {plan}: no plan has such a name; `nebula sweep` prints it") from None
    if found.facts.now - at > at_most:
        age = int((found.facts.now - at).total_seconds() // 60)
        raise click.ClickException(f"the plan is {age} minutes old: look again with nebula sweep")
    if digest != _digest(found):
        raise click.ClickException(
            "what would be ended is not what that plan said: look again with nebula sweep"
        )


# --- protect ---------------------------------------------------------------------------------------------


async def protect_machine(
    engine: AsyncEngine,
    resource: str,
    *,
    provider: str | None,
    until: datetime,
    reason: str,
    by: str,
    at_most: timedelta,
) -> str:
    """Raises:
    click.ClickException: nothing was protected; why.
    """
    query = text("""
        select provider, account from instance_seen where resource_id = :id and claim_uid is not null
        union select provider, account from run where resource_id = :id
        union select provider, account from orphan_finding where resource_id = :id
    """)
    async with begin(engine) as conn:
        now = await database_now(conn)
        found = list((await conn.execute(query, {"id": resource})).mappings())
        found = [row for row in found if provider in (None, row["provider"])]
        if not found:
            raise click.ClickException(
                f"no machine or part of ours has the id {resource}: nothing to protect"
            )
        if len(found) > 1:
            names = ", ".join(row["provider"] for row in found)
            raise click.ClickException(f"{resource} is at {names}: say which with --provider")
        if until <= now:
            raise click.ClickException("--until is in the past")
        if until - now > at_most:
            raise click.ClickException(
                f"--until: at most {at_most.days} days; protect it again when they are over"
            )
        (row,) = found
        await findings.protect(
            conn,
            provider=row["provider"],
            account=row["account"],
            resource_id=resource,
            until=until,
            reason=reason,
            by=by,
        )
    return f"{resource} on {row['provider']} is protected until {until:%Y-%m-%d %H:%M} UTC"


# --- forget ----------------------------------------------------------------------------------------------


async def forget_claim(
    settings: Settings,
    engine: AsyncEngine,
    claim: str,
    *,
    confirm: str,
    reason: str,
    by: str,
    cluster_lost: bool,
) -> str:
    """Let go of a claim that nothing speaks for: no Pod, no list of ours, and no list of a leader's.

    ``cluster_lost``: a person says that there is no cluster to ask for the Pod.

    Raises:
        click.ClickException: nothing was forgotten; why.
        OtherInstallation: the cluster is not this database's.
    """
    async with begin(engine) as conn:
        us = await _installed(conn)
        _check_installation(confirm, us.id)
        row = await _rental(conn, claim)
    key = (row["provider"], row["account"])
    if row["state"] == "ended":
        raise click.ClickException(f"claim {claim} has ended: there is nothing to forget")
    if not settings.providers:
        raise click.ClickException(
            f"no providers are given (--providers or NEBULA_PROVIDERS), so account {key[0]}/{key[1]} cannot"
            " be asked: give those of the controller, and the account itself even if its credentials are void"
        )
    if not cluster_lost:
        await _check_pod(settings, row, installation=us.id)
    async with begin(engine) as conn:
        last, now = await findings.last_run(conn), await database_now(conn)
        listed_at = await rounds.last_whole(conn, provider=key[0], account=key[1])
    if listed_at is not None and now - listed_at < LISTED_LATELY:
        age_s = int((now - listed_at).total_seconds())
        minutes = int(LISTED_LATELY.total_seconds() // 60)
        raise click.ClickException(
            f"account {key[0]}/{key[1]} was listed whole {age_s} s ago: a controller has it open, and will"
            " prove the claim's end. Wait; or, if its answers are wrong, take the account out of the"
            f" controller's NEBULA_PROVIDERS, and try again {minutes} minutes later"
        )
    if last is not None and (now - last["finished_at"]).total_seconds() < 2 * findings.RUN_EVERY_S:
        lists = {(place["provider"], place["account"]) for place in last["places"] if not place["unknown"]}
        if key in lists:  # it would end the machine at once, as one that came after its rental's end
            raise click.ClickException(
                f"the controller lists account {key[0]}/{key[1]}, and will prove the claim's end: wait,"
                " or take the account out of its NEBULA_PROVIDERS if its answers are wrong"
            )
    if any(entry.key == key for entry in settings.providers):
        found = await look(settings, engine)
        shown = [
            one.ref.resource_id
            for one in found.facts.machines
            if one.identity is not None and one.identity.claim_uid == row["claim_uid"] and one.state != "gone"
        ]
        if shown:
            raise click.ClickException(f"machine {shown[0]} of it is there: end it instead (delete the Pod)")
        whole = [place for place in found.facts.places.get(key, ()) if place.unknown is None]
        if whole:
            raise click.ClickException(
                f"account {key[0]}/{key[1]} answers, and the claim's end will be proven by its lists:"
                " wait, or leave the account out of --providers if its answers are wrong"
            )
    async with begin(engine) as conn:
        us = await _installed(conn, lock=True)
        values = {name: row[name] for name in rentals.RENTAL_COLUMNS}
        await rentals.begin_ending(conn, values, reason=f"forgotten by {by}: {reason}", epoch=us.epoch)
        if not await rentals.end(conn, row["claim_uid"], epoch=us.epoch):
            raise click.ClickException("the rental was changed meanwhile: nothing was forgotten, try again")
        for finding_id in await _findings_of(conn, row, installation=us.id):
            await findings.resolve(conn, finding_id, how="forgotten", by=by, reason=reason)
    return (
        f"claim {row['claim_name']} is forgotten: its finalizer goes, whatever its machine at {key[0]} costs"
    )


async def _check_pod(settings: Settings, row: RowMapping, *, installation: str) -> None:
    """Raises:
    click.ClickException: the claim is there and its Pod wants the machine; or that cannot be told.
    OtherInstallation: see `forget_claim`.
    """
    namespace, name = row["pod_namespace"], row["pod_name"]
    try:
        async with asyncio.timeout(CLUSTER_S), await Kube.connect(kubeconfig=settings.kubeconfig) as kube:
            await check_installation(kube, namespace=settings.namespace, ours=installation)
            claim = await kube.find(paths.nodeclaim(row["claim_name"]))
            if claim is None or claim["metadata"]["uid"] != row["claim_uid"] or not name:
                return
            pod = await kube.find(paths.pod(namespace, name))
    except (NoCluster, KubeError, TimeoutError, OSError) as error:
        raise click.ClickException(
            f"whether Pod {namespace}/{name} still wants the machine cannot be read"
            f" ({str(error) or 'no answer'}): give --kubeconfig, or --cluster-is-lost if there is no cluster"
            " any more"
        ) from None
    if pod is None or pod["metadata"]["uid"] != row["pod_uid"] or is_leaving(pod) or is_over(pod):
        return
    raise click.ClickException(
        f"claim {row['claim_name']} is there, and its Pod {namespace}/{name} is not over: delete the Pod"
        f" first (kubectl delete pod -n {namespace} {name}), which ends the machine if its account answers"
    )


async def _findings_of(conn: AsyncConnection, row: RowMapping, *, installation: str) -> list[int]:
    """Its open findings; where there is none, one is written, so that the trail has this deed."""
    query = text("select id from orphan_finding where claim_uid = :uid and resolved_at is null")
    ids = list((await conn.execute(query, {"uid": row["claim_uid"]})).scalars())
    if ids:
        return ids
    written = await findings.sighted(
        conn,
        [
            findings.Sighted(
                key=f"{Kind.RENTAL_ONLY}|{row['provider']}|{row['account']}|{row['claim_uid']}",
                kind=Kind.RENTAL_ONLY.value,
                mark="forgotten",
                installation=installation,
                provider=row["provider"],
                account=row["account"],
                region=row["region"],
                resource_id=row["resource_id"],
                identity=None,
                claim_uid=row["claim_uid"],
                attempt=None,
                provider_created_at=None,
                provider_state=row["state"],
                exists_since=row["created_at"],
                usd_per_hour=None,
                cost_so_far=None,
                namespace=row["pod_namespace"],
                workload=row["pod_name"],
                why="forgotten by a person",
                decision=Next.REPORT.value,
                decided_by=By.PERSON.value,
                blocked_by=None,
                eligible_at=None,
                evidence={},
            )
        ],
        before={},
    )
    return list(written.values())


async def _rental(conn: AsyncConnection, claim: str) -> RowMapping:
    query = text("""
        select * from rental where claim_uid = :claim or claim_name = :claim
        order by state = 'ended', created_at desc limit 1
    """)
    row = (await conn.execute(query, {"claim": claim})).mappings().one_or_none()
    if row is None:
        raise click.ClickException(f"no claim {claim} was ever rented for: give a NodeClaim's name or UID")
    return row


# --- adopt -----------------------------------------------------------------------------------------------


async def adopt_machine(
    settings: Settings, engine: AsyncEngine, resource: str, *, claim_name: str, by: str
) -> str:
    """Raises:
    click.ClickException: nothing was adopted; why.
    """
    async with begin(engine) as conn:
        us = await _installed(conn)
    claim = await _claim(settings, claim_name, installation=us.id)
    async with begin(engine) as conn:
        query = text("""
            select claim_uid, attempt, region from instance_seen
            where provider = :provider and account = :account and resource_id = :id
        """)
        values = {"provider": claim.provider, "account": claim.account, "id": resource}
        seen = (await conn.execute(query, values)).mappings().one_or_none()
    region = seen["region"] if seen is not None else claim.region
    machine, account_id = await _machine(settings, us.id, claim, resource, region)
    identity = parse(machine.identity)
    if identity is not None and identity.installation != us.id:
        raise click.ClickException(
            f"{resource} is installation {identity.installation}'s, and not ours to adopt"
        )
    named = identity.claim_uid if identity is not None else (seen["claim_uid"] if seen is not None else None)
    if named is None:
        raise click.ClickException(
            f"{resource} is somebody else's: it carries no identity of ours, and never did"
        )
    if named != claim.uid:
        raise click.ClickException(
            f"{resource} was made for claim {named}, which alone can adopt it;"
            f" {claim.name} is claim {claim.uid}"
        )
    async with begin(engine) as conn:
        us = await _installed(conn, lock=True)
        rows = await rentals.load(conn, claim.uid, provider=claim.provider, account=claim.account)
        if rows.state is None:
            await rentals.open_rental(conn, claim.columns(), epoch=us.epoch)
        elif rows.state != "open":
            what = f"has machine {rows.resource_id}" if rows.state == "live" else f"is {rows.state}"
            raise click.ClickException(f"claim {claim.name} {what}: it can adopt no other")
        facts = RunFacts(
            attempt=identity.attempt
            if identity is not None
            else (seen["attempt"] if seen is not None else 1),
            resource_id=machine.ref.resource_id,
            region=machine.ref.region,
            account_id=account_id,
            meters=meters_json(machine.meters),
            usd_per_hour=usd_per_hour(machine.meters),
            accepted=False,
            seen=True,
            provider_created_at=machine.created_at,
        )
        state, main = await rentals.record(conn, claim.columns(), facts, outcome="found", epoch=us.epoch)
        if state != "live" or main != machine.ref.resource_id:
            raise click.ClickException("the rental was changed meanwhile: nothing was adopted, try again")
        for row in await findings.open_of(conn, resource):
            await findings.resolve(conn, row["id"], how="adopted", by=by, reason=f"claim {claim.name}")
    return f"{resource} is the machine of claim {claim.name} now"


async def _claim(settings: Settings, name: str, *, installation: str) -> ClaimSpec:
    try:
        async with await Kube.connect(kubeconfig=settings.kubeconfig) as kube:
            await check_installation(kube, namespace=settings.namespace, ours=installation)
            found = await kube.find(paths.nodeclaim(name))
    except (NoCluster, KubeError) as error:
        raise click.ClickException(f"the claim cannot be read: {error}") from None
    if found is None:
        raise click.ClickException(f"there is no NodeClaim {name}")
    if "deletionTimestamp" in found["metadata"]:
        raise click.ClickException(f"NodeClaim {name} is being deleted: it adopts nothing")
    try:
        return claim_spec(found)
    except UnreadableClaim as error:
        raise click.ClickException(str(error)) from None


async def _machine(
    settings: Settings, installation: str, claim: ClaimSpec, resource: str, region: str
) -> tuple[Machine, str]:
    """The machine by its id, live, and the account it is in."""
    entries = tuple(entry for entry in settings.providers if entry.key == claim.key)
    if not entries:
        raise click.ClickException(f"account {claim.provider}/{claim.account} is not among --providers")
    accounts = Accounts(settings.model_copy(update={"providers": entries}), installation)
    opening = asyncio.create_task(accounts.run(), name="open account")
    try:
        async with asyncio.timeout(20):
            await accounts.tried()
        account = accounts.get(claim.key)
        if account is None:
            raise click.ClickException(f"account {claim.provider}/{claim.account} cannot be opened")
        ref = Ref(
            provider=claim.provider,
            account=claim.account,
            region=region,
            resource_id=ResourceId(resource),
        )
        try:
            machine = await account.provider.get(ref)
        except ProviderError as error:
            raise click.ClickException(f"{resource} cannot be looked at: {error}") from None
        if machine is None or not machine.exists:
            raise click.ClickException(f"{claim.provider} has no machine {resource}")
        return machine, account.account_id
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)


# --- check-providers -------------------------------------------------------------------------------------


async def left_out(settings: Settings, engine: AsyncEngine) -> list[str]:
    """A line for each account with rentals that have not ended, or open runs, and no configuration."""
    query = text("""
        select provider, account, count(*) as n, min(claim_name) as example from rental where state <> 'ended'
        group by provider, account order by provider, account
    """)
    async with begin(engine) as conn:
        rows = list((await conn.execute(query)).mappings())
    configured = {entry.key for entry in settings.providers}
    return [
        f"provider {row['provider']}/{row['account']} must stay configured: {row['n']} claims have, or may"
        f" have, machines there ({row['example']}); delete their Pods first, or nebula orphans forget"
        for row in rows
        if (row["provider"], row["account"]) not in configured
    ]


def _check_installation(given: str, ours: str) -> None:
    if given != ours:
        raise click.ClickException(f"--confirm {given}: this is installation {ours}; nothing was done")


async def _installed(conn: AsyncConnection, *, lock: bool = False) -> Installation:
    found = await installation_of(conn, lock=lock)
    if found is None:
        raise click.ClickException("the database has no installation: no controller has run with it yet")
    return found
