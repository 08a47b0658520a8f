"""The tables of the sweep's trail. Rows are never deleted; what happened to a finding is only ever added to.

`orphan_finding` is the newest state of each finding; `orphan_event` is its history, and the database itself
refuses to change or remove a row of that. The views are in ``app/store/views/50_orphans.sql``.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    Text,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.store.tables import NOW, Base


class OrphanFinding(Base):
    """One thing that was not as it should be, from the first sweep that saw it to its end."""

    __tablename__ = "orphan_finding"
    __table_args__ = (
        Index(
            "orphan_finding_open_idx",
            "key",
            unique=True,
            postgresql_where=text("resolved_at is null"),
        ),
        Index(None, "provider", "account", "resource_id"),
        Index(None, "first_seen_at"),
        CheckConstraint("(resolved_at is null) = (resolved_as is null)", name="resolved"),
        CheckConstraint("usd_per_hour is null or usd_per_hour >= 0", name="price"),
        {"comment": "Findings of the sweep, open and resolved; rows are never deleted. Written by sweep/."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    key: Mapped[str] = mapped_column(comment="kind and what it is about: one open finding for each")
    kind: Mapped[str] = mapped_column(comment="no-claim, duplicate, terminating-slow, …; docs/orphans.md")
    mark: Mapped[str] = mapped_column(comment="reason and state: when it changes, sightings count anew")
    installation: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str]
    resource_id: Mapped[str | None] = mapped_column(comment="the machine's or part's; null: of a claim alone")
    identity: Mapped[str | None] = mapped_column(comment="raw, as the cloud showed it")
    claim_uid: Mapped[str | None]
    attempt: Mapped[int | None] = mapped_column(Integer)
    provider_created_at: Mapped[datetime | None] = mapped_column(comment="as the cloud says, sane or not")
    provider_state: Mapped[str]
    exists_since: Mapped[datetime] = mapped_column(
        comment="its creation where the cloud's word is sane, else our first sight of it"
    )
    usd_per_hour: Mapped[Decimal | None] = mapped_column(comment="null is unpriced, not free")
    cost_so_far: Mapped[Decimal | None] = mapped_column(comment="dollars at that price; an estimate")
    namespace: Mapped[str]
    workload: Mapped[str] = mapped_column(comment="the Pod it belongs or belonged to; empty: nobody knows")
    why: Mapped[str]
    first_seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    last_seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    marked_at: Mapped[datetime] = mapped_column(server_default=NOW, comment="since then mark is the same")
    sightings: Mapped[int] = mapped_column(Integer, server_default=text("1"), comment="with the same mark")
    decision: Mapped[str] = mapped_column(comment="terminate, wait, blocked, report or protect")
    decided_by: Mapped[str] = mapped_column(comment="whose it is to act: sweep, provisioning, claims, person")
    blocked_by: Mapped[str | None] = mapped_column(comment="the rail that holds it back")
    eligible_at: Mapped[datetime | None]
    evidence: Mapped[dict[str, Any]] = mapped_column(
        server_default=text("'{}'::jsonb"), comment="the rails, one by one, as last judged"
    )
    approved_at: Mapped[datetime | None]
    approved_by: Mapped[str | None]
    executed_at: Mapped[datetime | None] = mapped_column(comment="its end was last begun")
    tries: Mapped[int] = mapped_column(Integer, server_default=text("0"), comment="how often it was begun")
    provider_response: Mapped[str | None]
    gone_confirmed_at: Mapped[datetime | None]
    resolved_at: Mapped[datetime | None]
    resolved_as: Mapped[str | None] = mapped_column(comment="gone, adopted, forgotten or cleared")


class OrphanEvent(Base):
    """What happened to a finding, one row each; nothing here is ever changed."""

    __tablename__ = "orphan_event"
    __table_args__ = (
        Index(None, "finding_id"),
        {"comment": "History of findings; the database refuses updates and deletes. Written by sweep/."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    finding_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("orphan_finding.id"))
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    what: Mapped[str] = mapped_column(comment="found, decided, approved, executed, protected, resolved, …")
    by: Mapped[str] = mapped_column(comment="controller, or the name of a person")
    detail: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))


class SweepRun(Base):
    """One sweep whose result differed from the one before, or the first in a quarter of an hour."""

    __tablename__ = "sweep_run"
    __table_args__ = (
        Index(None, "started_at"),
        Index(None, "version", "started_at"),
        {"comment": "Sweeps: a row when the result changes, else every 15 min. Written by sweep/."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime] = mapped_column(server_default=NOW)
    version: Mapped[str] = mapped_column(comment="of Nebula: the first hour of each is report-only")
    mode: Mapped[str] = mapped_column(comment="sweep or report")
    report_only: Mapped[list[str]] = mapped_column(
        ARRAY(Text), server_default=text("'{}'"), comment="why nothing could be ended, each reason"
    )
    leader: Mapped[str]
    places: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"), comment="each list: provider, account, region, machines, unknown"
    )
    ours: Mapped[int] = mapped_column(Integer)
    findings: Mapped[dict[str, Any]] = mapped_column(
        server_default=text("'{}'::jsonb"), comment="how many of each kind"
    )
    others: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"), comment="machines that are not ours: installation, count, price"
    )
    bounds: Mapped[dict[str, Any]] = mapped_column(
        server_default=text("'{}'::jsonb"), comment="seconds within which an orphan ends, by account"
    )
    terminated: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    blocked: Mapped[dict[str, Any]] = mapped_column(
        server_default=text("'{}'::jsonb"), comment="how many findings each rail holds back"
    )
    error: Mapped[str | None]


class Protection(Base):
    """A person's word that one machine stays until a moment, never longer."""

    __tablename__ = "protection"
    __table_args__ = (
        Index(None, "provider", "account", "resource_id"),
        {"comment": "Machines and parts that people keep from the sweep, each with an end. By commands."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    provider: Mapped[str]
    account: Mapped[str]
    resource_id: Mapped[str]
    until: Mapped[datetime] = mapped_column(comment="the newest row of a machine counts")
    reason: Mapped[str]
    by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


KEEP_EVENTS = """
create function refuse_change() returns trigger language plpgsql as $$
begin
    raise exception '% is append-only', tg_table_name;
end
$$
"""
KEEP_EVENTS_TRIGGER = """
create trigger orphan_event_append_only before update or delete on orphan_event
    for each row execute function refuse_change()
"""


def _after_create(statement: str) -> None:
    ddl: Any = DDL  # SQLAlchemy has no types for it
    event.listen(Base.metadata, "after_create", ddl(statement.replace("%", "%%")))


_after_create(KEEP_EVENTS)
_after_create(KEEP_EVENTS_TRIGGER)
