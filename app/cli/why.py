"""``nebula why``: the last decision on a Pod, candidate by candidate, and what would change it.

It reads the record only: the words are the ones that placement wrote, the ends of blocks are those of now.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from app.cli import output
from app.cli.database import database_option, run, settings_of

if TYPE_CHECKING:
    from app.placement.remedies import Looked
    from app.store.blocks import Block
    from app.store.decisions import Recorded

TITLES = ("PROVIDER", "ACCOUNT", "REGION", "TIER", "$/H", "VERDICT", "DETAIL")
MESSAGE_CHARS = 100  # of what a cloud said; JSON has it whole


@click.command("why")
@database_option
@click.argument("pod")
@click.option("-n", "--namespace", default="default", show_default=True, help="The Pod's namespace.")
@click.option("--uid", help="An earlier Pod of this name, by its UID.")
@output.style_option
def command(database_url: str | None, pod: str, namespace: str, uid: str | None, style: output.Style) -> None:
    """Say why POD is placed where it is, or not at all.

    It shows every candidate of the last decision in the order of trying, and what would make the Pod
    placeable.
    """
    settings = settings_of(database_url=database_url)
    found, blocks, uids, now = run(_read(settings, namespace=namespace, name=pod, uid=uid))
    if found is None:
        raise click.ClickException(_unknown(namespace, pod, uid=uid, uids=uids))

    from app.placement.remedies import looked, remedies

    places = looked(found.decision, blocks=blocks)
    ways = remedies(found.decision, places, now=now, relative=lambda moment: output.until(moment, now=now))
    if style == "json":
        click.echo(output.to_json(_plain(found, places, ways)))
        return
    click.echo(_header(found, now=now))
    if found.decision.message:
        click.echo(f"\n{found.decision.message}")
    if places:
        rows = [_row(place, now=now) for place in places]
        click.echo("\n" + output.table(TITLES, rows, right=("$/H",)))
    if ways:
        click.echo("\nWhat would make it placeable:")
        for way in ways:
            click.echo(f"  - {way}")


async def _read(
    settings: Any, *, namespace: str, name: str, uid: str | None
) -> "tuple[Recorded | None, list[Block], list[str], datetime]":
    """The decision with its blocks, or else the UIDs that the name is known by."""
    from app.placement.remedies import block_ids
    from app.store import blocks, decisions
    from app.store.engine import connect, database_now, engine_of

    engine = engine_of(settings)
    try:
        async with connect(engine) as conn:
            now = await database_now(conn)
            found = await decisions.latest_of(conn, namespace, name, uid=uid)
            if found is None:
                return None, [], await decisions.uids_of(conn, namespace, name), now
            ids = block_ids(found.decision)
            return found, await blocks.load(conn, ids=ids, lapsed=True) if ids else [], [], now
    finally:
        await engine.dispose()


def _unknown(namespace: str, name: str, *, uid: str | None, uids: list[str]) -> str:
    if uids:
        return f"no Pod {namespace}/{name} with UID {uid} is on record; known are: {', '.join(uids)}"
    from app.api import keys

    return "\n".join(
        (
            f"no decision on Pod {namespace}/{name} is on record; check",
            "  its name and namespace (-n)",
            f"  that it opted in: label {keys.ENABLED_LABEL}={keys.ENABLED} when it was created",
            f"  that admission saw it: scheduling gate {keys.SCHEDULING_GATE}, or a Pod already placed",
            "  that a controller leads, and that this is its database (--database-url)",
            "  that its last decision is no older than two weeks: then it is forgotten",
        )
    )


def _header(found: "Recorded", *, now: datetime) -> str:
    """``Pod team/w-1 (uid …): all_blocked in NodePool gpu, 5s ago; 12 equal looks since 3m ago``."""
    decision = found.decision
    text = f"Pod {decision.pod_namespace}/{decision.pod_name} (uid {decision.pod_uid}): {decision.outcome}"
    text += f" in NodePool {decision.pool}" if decision.pool else ""
    text += f", {output.since(found.last_decided_at, now=now)} ago"
    if found.looks > 1:
        text += f"; {found.looks} equal looks since {output.since(found.decided_at, now=now)} ago"
    return text


def _row(place: "Looked", *, now: datetime) -> list[str]:
    return [
        place.provider,
        place.account,
        place.region or output.NONE,
        place.tier,
        _money(place),
        place.verdict,
        _detail(place, now=now) or output.NONE,
    ]


def _money(place: "Looked") -> str:
    from app.api.quantities import usd

    if place.usd_per_hour is not None:
        return usd(place.usd_per_hour)
    return "unknown" if place.region is not None else output.NONE  # a whole provider has no one price


def _detail(place: "Looked", *, now: datetime) -> str:
    """The words of the record; of a block also its end as it is now, and what the cloud said."""
    if not place.blocks:
        return place.detail
    last = place.blocks[0]
    end = output.until(last.expires_at, now=now)
    text = f"{place.detail}, free {end}" if last.expires_at > now else f"{place.detail}, over since {end}"
    said = " ".join(last.cause.message.split())
    if len(said) > MESSAGE_CHARS:
        said = said[: MESSAGE_CHARS - 1] + "…"
    return f"{text}: {said}" if said else text


def _plain(found: "Recorded", places: "list[Looked]", ways: list[str]) -> dict[str, Any]:
    decision = found.decision
    return {
        "namespace": decision.pod_namespace,
        "pod": decision.pod_name,
        "uid": decision.pod_uid,
        "pool": decision.pool,
        "outcome": decision.outcome,
        "message": decision.message or None,
        "looks": found.looks,
        "decidedAt": found.decided_at,
        "lastDecidedAt": found.last_decided_at,
        "candidates": [
            {
                "provider": place.provider,
                "account": place.account,
                "region": place.region,
                "tier": place.tier,
                "usdPerHour": place.usd_per_hour,
                "verdict": place.verdict,
                "skip": place.skip,
                "detail": place.detail,
                "forGood": place.for_good,
                "blocks": [
                    {
                        "id": block.id,
                        "reason": block.cause.kind,
                        "message": block.cause.message,
                        "expiresAt": block.expires_at,
                    }
                    for block in place.blocks
                ],
            }
            for place in places
        ],
        "placeable": ways,
    }
