"""Which revisions of the schema this database has had, and which code may still run with each.

A revision's ``min_reader`` is the newest revision that code must know to be able to use the database after
it: code that knows less is too old. So a rollback starts where the change only added things, and is refused
where it would misread rows. Revisions are four digits and compare as text; alembic's own table says only
which one is in force.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib import resources

from sqlalchemy import CheckConstraint, Connection, func, inspect, select
from sqlalchemy.orm import Mapped, mapped_column

from app.store.tables import NOW, Base

ALEMBIC_TABLE = "alembic_version"


class SchemaRevision(Base):
    """One row for each revision that was applied."""

    __tablename__ = "schema_revision"
    __table_args__ = (
        CheckConstraint("min_reader <= revision", name="min_reader"),
        {"comment": "Revisions applied, and the oldest code that each allows. Written by migrations."},
    )

    revision: Mapped[str] = mapped_column(primary_key=True)
    min_reader: Mapped[str] = mapped_column(
        comment="code that does not know this revision yet must not use the database"
    )
    applied_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Verdict(StrEnum):
    """How a database's schema and this code go together."""

    CURRENT = "current"
    BEHIND = "behind"  # also: empty; a migration mends it
    NEWER = "newer"  # and usable: every newer revision allows this code
    TOO_NEW = "too new"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What was found. ``revision`` None: an empty database; ``head``: the newest that this code knows."""

    revision: str | None
    head: str
    verdict: Verdict

    @property
    def usable(self) -> bool:
        return self.verdict in (Verdict.CURRENT, Verdict.NEWER)


@cache
def head() -> str:
    """The newest revision of the migrations that came with this code."""
    versions = resources.files("migrations").joinpath("versions")
    return max(entry.name[:4] for entry in versions.iterdir() if entry.name[:4].isdigit())


def read(conn: Connection, *, known: str | None = None) -> State:
    """Compare the database with ``known`` (default: `head`). Runs no DDL, so a read-only role will do."""
    known = known or head()
    if not inspect(conn).has_table(SchemaRevision.__tablename__):
        return State(revision=None, head=known, verdict=Verdict.BEHIND)
    newest = conn.execute(select(func.max(SchemaRevision.revision))).scalar_one()
    if newest is None or newest < known:
        verdict = Verdict.BEHIND
    elif newest == known:
        verdict = Verdict.CURRENT
    else:
        needed = select(func.max(SchemaRevision.min_reader)).where(SchemaRevision.revision > known)
        verdict = Verdict.NEWER if conn.execute(needed).scalar_one() <= known else Verdict.TOO_NEW
    return State(revision=newest, head=known, verdict=verdict)
