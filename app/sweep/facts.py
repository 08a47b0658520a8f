"""From what the rooms below know to the facts of one sweep: lists first, then claims, then rows.

In that order, so a claim that was made while a slow list ran is visible, and no new machine looks ownerless.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from importlib.metadata import version as version_of
from math import inf

from sqlalchemy import RowMapping

from app.inventory.accounts import Account
from app.inventory.identity import parse
from app.inventory.rounds import Judged, Place
from app.settings import Settings
from app.store.sweep_facts import Rows
from app.sweep.model import (
    AccountKey,
    Bounds,
    ClaimFact,
    Facts,
    Kind,
    Limits,
    MachineKey,
    Memory,
    Mode,
    Owner,
    PlaceFact,
    Protection,
    RentalFact,
    RunFact,
    Sighting,
)
from providers.base import ClaimUid, Machine, Ref, ResourceId, usd_per_hour

# Of an account that is configured and not open: nothing is concluded there, so no time matters.
UNOPENED = Bounds(grace_s=0, interval_s=0, launch_s=inf, ending_s=inf, terminate_s=0, part_grace_s=0)


def version() -> str:
    """Of this code."""
    return version_of("nebula")


def bounds_of(account: Account, settings: Settings) -> Bounds:
    """What an account's adapter declares, turned into the sweep's times."""
    traits = account.traits
    return Bounds(
        grace_s=account.provision_timeout_s + account.settle_after_s + settings.sweep_margin_s,
        interval_s=settings.sweep_every_s,
        launch_s=max(settings.sweep_launch_s, account.provision_timeout_s),
        ending_s=settings.sweep_ending_s,
        terminate_s=2 * max(traits.list_every_s, settings.list_rest_s) + account.call_timeout_s,
        part_grace_s=settings.sweep_part_grace_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The newest list of one place; while that is not whole, with the machines of the last whole one."""

    place: Place
    machines: tuple[Machine, ...]
    began_at: float  # the inventory's clock
    unknown: str | None


class Lists:
    """Follows an inventory's rounds."""

    def __init__(self) -> None:
        self.newest: dict[Place, Listed] = {}

    def take(self, judged: Judged) -> None:
        """A round was judged."""
        before = self.newest.get(judged.place)
        if judged.unknown is None or before is None:
            self.newest[judged.place] = Listed(
                place=judged.place,
                machines=judged.machines,
                began_at=judged.began_at,
                unknown=judged.unknown,
            )
        else:
            self.newest[judged.place] = Listed(
                place=before.place,
                machines=before.machines,
                began_at=before.began_at,
                unknown=judged.unknown,
            )

    def claims(self, installation: str) -> set[str]:
        """The claims that machines of ours name."""
        found = set()
        for listed in self.newest.values():
            for machine in listed.machines:
                identity = parse(machine.identity)
                if identity is not None and identity.installation == installation:
                    found.add(str(identity.claim_uid))
        return found

    def ids(self) -> set[str]:
        """The ids of all machines."""
        return {
            str(machine.ref.resource_id) for listed in self.newest.values() for machine in listed.machines
        }


def whole_lists(facts: Facts) -> dict[str, bool]:
    """Each configured provider, and whether every account of it was listed whole."""
    found: dict[str, bool] = {}
    for key in facts.bounds:
        places = facts.places.get(key, ())
        complete = bool(places) and all(place.unknown is None for place in places)
        found[key[0]] = found.get(key[0], True) and complete
    return found


def facts_of(
    rows: Rows,
    *,
    installation: str,
    lists: Iterable[Listed],
    here: float,
    accounts: Iterable[AccountKey],
    bounds: Mapping[AccountKey, Bounds],
    claims: Collection[ClaimFact],
    mode: Mode,
    limits: Limits,
) -> Facts:
    """One sweep's facts. ``here`` is the inventory's clock at the database's ``rows.now``."""
    now, runs = rows.now, {one.key: one for one in map(_run, rows.runs)}
    seen = {(row["provider"], row["account"], ResourceId(row["resource_id"])): row for row in rows.seen}
    places: dict[AccountKey, list[PlaceFact]] = {key: [] for key in accounts}
    machines = []
    for listed in lists:
        place = listed.place
        listed_at = now - timedelta(seconds=max(0.0, here - listed.began_at))
        places.setdefault((place.provider, place.account), []).append(
            PlaceFact(
                provider=place.provider,
                account=place.account,
                region=place.region,
                unknown=listed.unknown,
                machines=len(listed.machines),
            )
        )
        for machine in listed.machines:
            key = (machine.ref.provider, machine.ref.account, machine.ref.resource_id)
            machines.append(_sighting(machine, seen.get(key), listed_at=listed_at))
    return Facts(
        installation=installation,
        now=now,
        places={key: tuple(found) for key, found in places.items()},
        machines=tuple(machines),
        claims={one.uid: one for one in claims},
        rentals={one.uid: one for one in map(_rental, rows.rentals)},
        runs=runs,
        bounds=bounds,
        protections={
            (row["provider"], row["account"], ResourceId(row["resource_id"])): Protection(
                until=row["until"], reason=row["reason"], by=row["by"]
            )
            for row in rows.protections
        },
        memory={row["key"]: _memory(row) for row in rows.findings},
        owners={
            ClaimUid(row["uid"]): Owner(namespace=row["pod_namespace"], pod=row["pod_name"], gone=True)
            for row in rows.owners
        },
        lost=_lost(seen, now, bounds),
        mode=mode,
        limits=limits,
    )


def _sighting(machine: Machine, row: RowMapping | None, *, listed_at: datetime) -> Sighting:
    uid = row["claim_uid"] if row is not None else None
    return Sighting(
        ref=machine.ref,
        raw_identity=machine.identity.replace("\0", "") if machine.identity else machine.identity,
        identity=parse(machine.identity),
        state=machine.state,
        provider_created_at=machine.created_at,
        first_seen_at=row["first_seen_at"] if row is not None else listed_at,
        usd_per_hour=usd_per_hour(machine.meters),
        listed_at=listed_at,
        was_ours=ClaimUid(uid) if uid is not None else None,
    )


def _rental(row: RowMapping) -> RentalFact:
    return RentalFact(
        uid=ClaimUid(row["claim_uid"]),
        name=row["claim_name"],
        namespace=row["pod_namespace"],
        pod=row["pod_name"],
        provider=row["provider"],
        account=row["account"],
        state=row["state"],
        created_at=row["created_at"],
        resource_id=ResourceId(row["resource_id"]) if row["resource_id"] is not None else None,
        attempt=row["attempt"],
        unsettled=row["unsettled"],
        ending_at=row["ending_at"],
        ended_at=row["ended_at"],
    )


def _run(row: RowMapping) -> RunFact:
    return RunFact(
        uid=ClaimUid(row["claim_uid"]),
        ref=Ref(
            provider=row["provider"],
            account=row["account"],
            region=row["region"],
            resource_id=ResourceId(row["resource_id"]),
        ),
        usd_per_hour=_exact(row["usd_per_hour"]),
        namespace=row["pod_namespace"],
        pod=row["pod_name"],
        accepted_at=row["accepted_at"],
        exited_at=row["exited_at"],
        terminate_asked_at=row["terminate_asked_at"],
        gone_at=row["gone_at"],
        provider_created_at=row["provider_created_at"],
    )


def _memory(row: RowMapping) -> Memory:
    return Memory(
        finding_id=row["id"],
        kind=Kind(row["kind"]),
        mark=row["mark"],
        first_seen_at=row["first_seen_at"],
        marked_at=row["marked_at"],
        sightings=row["sightings"],
        approved_at=row["approved_at"],
        executed_at=row["executed_at"],
        tries=row["tries"],
    )


def _lost(
    seen: Mapping[MachineKey, RowMapping], now: datetime, bounds: Mapping[AccountKey, Bounds]
) -> frozenset[MachineKey]:
    """Machines that complete lists have left out for two intervals."""
    found = set()
    for key, row in seen.items():
        account = bounds.get((key[0], key[1]))
        since = row["absent_since"]
        if account is None or since is None:
            continue
        if (now - since).total_seconds() > 2 * account.interval_s:
            found.add(key)
    return frozenset(found)


def _exact(value: object) -> Decimal | None:
    return value if isinstance(value, Decimal) else None
