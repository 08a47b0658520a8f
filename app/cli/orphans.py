"""``nebula orphans`` and ``nebula sweep``: what is there without an owner, why, what it costs, what to do.

A look, by default: exit 0 where nothing is wrong, 2 with findings, 3 where a list was not whole. What changes
something says so in its name, and ends nothing itself: the leader does, by its own rules.
"""

import getpass
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import click

from app.cli import orphan_tables, output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from app.settings import Settings
    from app.sweep.audit import Audit

CLEAN, FOUND, INCOMPLETE = 0, 2, 3
PROTECT_AT_MOST = timedelta(days=30)

Style = Literal["table", "json", "csv"]


class WrongCluster(click.ClickException):
    """Nothing can be judged by another installation's claims: as little as by a list that was not whole."""

    exit_code = INCOMPLETE


providers_option = click.option("--providers", metavar="TEXT", help="Accounts to list [NEBULA_PROVIDERS]")
kubeconfig_option = click.option("--kubeconfig", metavar="PATH", help="Whose claims to read.")
by_option = click.option("--by", default=getpass.getuser, show_default="you", help="Who says so.")
style_option = click.option(
    "-o", "--output", "style", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True
)


def _look_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--offline-identity", metavar="ID", help="By this installation id alone: no database."),
        click.option("--sql", is_flag=True, help="Print the query behind it, and do nothing."),
        click.option("--kind", help="Only findings of this kind."),
        click.option("--since", metavar="TIME", help="Also those resolved since: 2h, 3d, or an ISO time."),
        style_option,
        kubeconfig_option,
        providers_option,
        database_option,
    ):
        command = option(command)
    return command


@click.group("orphans", invoke_without_command=True)
@_look_options
@click.pass_context
def group(context: click.Context, /, **options: Any) -> None:
    """Show machines and parts of ours that nobody owns. Ends nothing."""
    if context.invoked_subcommand is None:
        context.invoke(audit, **options)


@group.command("audit")
@_look_options
def audit(
    database_url: str | None,
    providers: str | None,
    kubeconfig: str | None,
    style: Style,
    since: str | None,
    kind: str | None,
    sql: bool,
    offline_identity: str | None,
) -> None:
    """Look at clouds, claims and rows, and say what does not fit. Exit 0 clean, 2 findings, 3 incomplete."""
    if sql:
        click.echo("select * from orphan_open order by usd_per_hour desc nulls last, finding_id;")
        return
    _check_kind(kind)
    if offline_identity is not None:
        _offline(offline_identity, providers=providers, style=style)
    settings = _settings(database_url=database_url, providers=providers, kubeconfig=kubeconfig)
    earlier_than = _moment(since, ago=True) if since else None
    found, resolved = run(_with_engine(settings, lambda engine: _look(settings, engine, earlier_than)))
    findings = [one for one in found.findings if kind in (None, one.kind.value)]
    if style == "json":
        click.echo(output.to_json(orphan_tables.plain(found, findings, resolved)))
    elif style == "csv":
        click.echo(
            orphan_tables.csv_text(
                [orphan_tables.TITLES, *(orphan_tables.row(one, found.facts.now) for one in findings)]
            )
        )
    else:
        orphan_tables.show(found, findings, resolved)
    raise SystemExit(INCOMPLETE if found.incomplete else FOUND if findings else CLEAN)


@group.command("explain")
@database_option
@providers_option
@kubeconfig_option
@click.argument("resource")
def explain(database_url: str | None, providers: str | None, kubeconfig: str | None, resource: str) -> None:
    """Say, rule by rule, why RESOURCE (a machine's id) is or is not a finding, and what happened to it."""
    settings = _settings(database_url=database_url, providers=providers, kubeconfig=kubeconfig)

    async def work(engine: "AsyncEngine") -> tuple["Audit", list[Any], list[Any]]:
        from app.store import findings as rows
        from app.store.engine import begin

        found, _ = await _look(settings, engine, None)
        async with begin(engine) as conn:
            past = [row for row in await rows.history(conn, all_=True) if row["resource_id"] == resource]
            return found, past, await rows.events_of(conn, [row["id"] for row in past])

    found, past, events = run(_with_engine(settings, work))
    from app.sweep.explain import explain as explained
    from app.sweep.explain import next_words

    machine = next((one for one in found.facts.machines if one.ref.resource_id == resource), None)
    part = next((one for one in found.findings if one.resource_id == resource), None)
    if machine is None and part is None and not past:
        raise click.ClickException(
            f"no list shows {resource}, and no finding was ever about it (an id as the cloud writes it;"
            f" accounts: {', '.join(sorted(f'{key[0]}/{key[1]}' for key in found.facts.places)) or 'none'})"
        )
    if machine is not None:
        rules, verdict = explained(machine, found.facts, found.findings)
        click.echo(f"{resource} on {machine.ref.provider}/{machine.ref.account}: {machine.state.value}\n")
    else:
        rules = list(part.rules) if part is not None else []
        verdict = "no list shows it now"
        if part is not None:
            verdict = f"{part.kind}: {part.why}; {next_words(part)}"
        click.echo(f"{resource}\n")
    for rule in rules:
        until = f", until {rule.until:%H:%M:%S} UTC" if rule.until is not None else ""
        click.echo(f"  {'ok ' if rule.passed else 'NO '} {rule.name:<14} {rule.detail}{until}")
    click.echo(f"\n{verdict}")
    if events:
        click.echo("\nWhat happened:")
    for event in events:
        click.echo(
            f"  {event['at']:%Y-%m-%d %H:%M:%S}  finding {event['finding_id']}  {event['what']:<10} "
            f"by {event['by']}{orphan_tables.detail(event['detail'])}"
        )


@group.command("protect")
@database_option
@click.argument("resource")
@click.option("--until", required=True, metavar="TIME", help="When it ends: 2h, 3d, or an ISO time.")
@click.option("--reason", required=True, help="Why it stays.")
@click.option("--provider", help="Where two clouds have a machine of that id.")
@by_option
def protect(
    database_url: str | None, resource: str, until: str, reason: str, provider: str | None, by: str
) -> None:
    """Keep RESOURCE from the sweep, for a time. It is shown with its cost; the ledger goes on."""
    settings = _settings(database_url=database_url)
    end = _moment(until, ago=False)

    async def work(engine: "AsyncEngine") -> str:
        from app.cli.orphan_deeds import protect_machine

        return await protect_machine(
            engine, resource, provider=provider, until=end, reason=reason, by=by, at_most=PROTECT_AT_MOST
        )

    click.echo(run(_with_engine(settings, work)))


@group.command("forget")
@database_option
@providers_option
@kubeconfig_option
@click.argument("claim")
@click.option("--reason", required=True, help="Why nobody needs to prove its end any more.")
@click.option("--confirm", required=True, metavar="ID", help="The installation id, as you read it.")
@click.option("--cluster-is-lost", is_flag=True, help="No cluster has the claim's Pod any more: do not ask.")
@by_option
def forget(
    database_url: str | None,
    providers: str | None,
    kubeconfig: str | None,
    claim: str,
    reason: str,
    confirm: str,
    cluster_is_lost: bool,
    by: str,
) -> None:
    """Let go of CLAIM (name or UID) whose machine nobody can reach any more: its account is lost.

    Its rental and runs are closed without a proof, and its finalizer goes. Refused while its Pod wants the
    machine, while any list still shows one of it, and while the controller lists the account.
    """
    settings = _settings(database_url=database_url, providers=providers, kubeconfig=kubeconfig)

    async def work(engine: "AsyncEngine") -> str:
        from app.cli.orphan_deeds import forget_claim

        return await forget_claim(
            settings, engine, claim, confirm=confirm, reason=reason, by=by, cluster_lost=cluster_is_lost
        )

    click.echo(run(_with_engine(settings, work)))


@group.command("adopt")
@database_option
@providers_option
@kubeconfig_option
@click.argument("resource")
@click.option("--claim", required=True, metavar="NAME", help="The NodeClaim that it is to be the machine of.")
@by_option
def adopt(
    database_url: str | None,
    providers: str | None,
    kubeconfig: str | None,
    resource: str,
    claim: str,
    by: str,
) -> None:
    """Record RESOURCE as the machine of a claim that has none: one that its identity names, or once named."""
    settings = _settings(database_url=database_url, providers=providers, kubeconfig=kubeconfig)

    async def work(engine: "AsyncEngine") -> str:
        from app.cli.orphan_deeds import adopt_machine

        return await adopt_machine(settings, engine, resource, claim_name=claim, by=by)

    click.echo(run(_with_engine(settings, work)))


@group.command("check-providers")
@database_option
@providers_option
@click.option("--unless-away", is_flag=True, help="Succeed where the database gives no answer.")
def check_providers(database_url: str | None, providers: str | None, unless_away: bool) -> None:
    """Fail (exit 2) where claims or machines are left at an account that --providers leaves out.

    For the hook before an upgrade: such an account must stay configured until its machines are gone.
    """
    from app.store.engine import StoreUnavailable

    settings = _settings(database_url=database_url, providers=providers)

    async def work(engine: "AsyncEngine") -> list[str] | None:
        from app.cli.orphan_deeds import left_out

        try:
            return await left_out(settings, engine)
        except StoreUnavailable as error:
            if not unless_away:
                raise
            click.echo(f"not checked, the database gives no answer: {error}", err=True)
            return None

    lines = run(_with_engine(settings, work))
    if lines is None:
        return
    for line in lines:
        click.echo(line, err=True)
    if lines:
        raise SystemExit(FOUND)
    click.echo("every account with claims or machines is configured")


@click.command("sweep")
@database_option
@providers_option
@kubeconfig_option
@click.option("--execute", is_flag=True, help="Approve the plan; the leader then ends the machines.")
@click.option("--confirm", metavar="ID", help="The installation id, typed back.")
@click.option("--plan", metavar="PLAN", help="Approve only this plan, as `nebula sweep` printed it.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to watch what becomes of it.",
)
@by_option
def sweep(
    database_url: str | None,
    providers: str | None,
    kubeconfig: str | None,
    execute: bool,
    confirm: str | None,
    plan: str | None,
    wait_s: float,
    by: str,
) -> None:
    """Look, and show what would be ended; with --execute --confirm ID, have it ended."""
    if execute and not confirm:
        raise click.UsageError("--execute needs --confirm ID: the installation id, as shown without it")
    if not execute and (confirm or plan):
        raise click.UsageError("--confirm and --plan go with --execute")
    settings = _settings(database_url=database_url, providers=providers, kubeconfig=kubeconfig)

    async def work(engine: "AsyncEngine") -> int:
        from app.cli.orphan_deeds import approve_plan, in_plan, plan_of

        found, _ = await _look(settings, engine, None)
        ours = [one for one in found.findings if in_plan(one)]
        if not execute:
            orphan_tables.show(found, list(found.findings), [])
            click.echo(f"\nPLAN  {plan_of(found)}  would end {len(ours)} of them")
            if ours:
                click.echo(
                    f"To do so: nebula sweep --execute --confirm {found.facts.installation}"
                    f" --plan {plan_of(found)}"
                )
            return INCOMPLETE if found.incomplete else FOUND if found.findings else CLEAN
        return await approve_plan(
            settings, engine, found, confirm=confirm or "", plan=plan, by=by, wait_s=wait_s, say=click.echo
        )

    raise SystemExit(run(_with_engine(settings, work)))


# --- looking ---------------------------------------------------------------------------------------------


def _settings(**flags: Any) -> "Settings":
    from app.inventory.accounts import check_adapters
    from app.telemetry import logs

    settings = settings_of(**flags)
    if errors := check_adapters(settings.providers):
        raise click.UsageError("\n".join(errors))
    logs.configure(level="error", style="console")
    return settings


async def _with_engine(settings: "Settings", work: Callable[["AsyncEngine"], Any]) -> Any:
    from app.inventory.accounts import BadOptions
    from app.kube.installation import OtherInstallation
    from app.store.engine import engine_of
    from app.sweep.audit import NothingInstalled

    engine = engine_of(settings)
    try:
        return await work(engine)
    except NothingInstalled as error:
        raise click.ClickException(str(error)) from None
    except OtherInstallation as error:
        raise WrongCluster(f"{error}; nothing was done") from None
    except BadOptions as error:
        raise click.UsageError(str(error)) from None
    finally:
        await engine.dispose()


async def _look(
    settings: "Settings", engine: "AsyncEngine", since: datetime | None
) -> tuple["Audit", list[Any]]:
    from app.store import findings as rows
    from app.store.engine import begin
    from app.sweep.audit import audit as look

    found = await look(settings, engine)
    if since is None:
        return found, []
    async with begin(engine) as conn:
        past = await rows.history(conn, since=since, all_=True)
    return found, [row for row in past if row["resolved_at"] is not None]


def _offline(installation: str, *, providers: str | None, style: Style) -> None:
    """Machines by their identity alone; ends the command."""
    import asyncio
    import os
    import re

    from app.inventory.accounts import check_adapters
    from app.settings import SettingsError, load
    from app.sweep.audit import offline
    from app.telemetry import logs

    if re.fullmatch(r"[a-z2-7]{10}", installation) is None:
        raise click.UsageError(f"--offline-identity {installation!r}: ten of a-z and 2-7 make an id")
    try:
        settings = load({"providers": providers}, os.environ)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if not settings.providers:
        raise click.UsageError("no accounts: give --providers or NEBULA_PROVIDERS")
    if errors := check_adapters(settings.providers):
        raise click.UsageError("\n".join(errors))
    logs.configure(level="error", style="console")
    facts = asyncio.run(offline(settings, installation))
    ours = [
        one
        for one in facts.machines
        if one.identity is not None and one.identity.installation == installation and one.state != "gone"
    ]
    if style == "json":
        click.echo(
            output.to_json(
                {
                    "installation": installation,
                    "machines": [orphan_tables.seen(one) for one in ours],
                    "lists": orphan_tables.lists_plain(facts),
                }
            )
        )
    else:
        titles = ("PROVIDER", "REGION", "INSTANCE", "STATE", "AGE", "$/H", "CLAIM", "ATTEMPT")
        table = [
            [
                one.ref.provider,
                one.ref.region or output.NONE,
                str(one.ref.resource_id),
                one.state.value,
                output.since(one.provider_created_at, now=facts.now) if one.provider_created_at else "-",
                orphan_tables.usd(one.usd_per_hour),
                str(one.identity.claim_uid) if one.identity else "-",
                str(one.identity.attempt) if one.identity else "-",
            ]
            for one in ours
        ]
        if style == "csv":
            click.echo(orphan_tables.csv_text([titles, *table]))
        else:
            click.echo(f"INSTALLATION {installation}   LISTS {orphan_tables.lists(facts)}\n")
            shown = output.table(titles, table, right=("AGE", "$/H"))
            click.echo(shown if table else "no machine of it is shown")
    whole = not any(place.unknown for places in facts.places.values() for place in places)
    raise SystemExit(INCOMPLETE if not whole else FOUND if ours else CLEAN)


def _check_kind(kind: str | None) -> None:
    from app.sweep.model import Kind

    if kind is not None and kind not in set(Kind):
        raise click.UsageError(f"--kind {kind}: one of {', '.join(Kind)}")


def _moment(text: str, *, ago: bool) -> datetime:
    """``2h``, ``3d``, ``30m`` from now (or before it), or an ISO time with a zone."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    now = datetime.now(UTC)
    if text[:-1].isdecimal() and text[-1:] in units:
        span = timedelta(seconds=int(text[:-1]) * units[text[-1]])
        return now - span if ago else now + span
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        example = "30m, 2h, 3d, or 2026-12-01T09:00:00+00:00"
        raise click.UsageError(f"{text!r} is no time: write {example}") from None
    if moment.tzinfo is None:
        raise click.UsageError(f"{text!r} names no zone: add +00:00, or write 2h")
    return moment.astimezone(UTC)
