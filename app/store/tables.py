"""The tables, each column with its meaning. The schema holds the invariants; migrations must match this file.

Money is `numeric` without scale and is never rounded when stored; times are ``timestamptz`` and come from the
database's clock unless the name says ``provider_``. UIDs are text, as Kubernetes hands them out.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Numeric,
    Sequence,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "pk": "%(table_name)s_pkey",
    "ix": "%(table_name)s_%(column_0_N_name)s_idx",
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
}
NOW = func.now()


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads the class attribute)
        datetime: DateTime(timezone=True),
        Decimal: Numeric(),
        str: Text(),
        dict[str, Any]: JSONB(),
        list[Any]: JSONB(),
        float: Double(),
    }


# Attempts are numbered across the whole installation, so that a machine which carries a number above our
# highest proves that this database has lost rows.
ATTEMPT_SEQUENCE = Sequence("attempt_sequence", metadata=Base.metadata, data_type=BigInteger)


class Installation(Base):
    """One row: who we are, and which leader may write."""

    __tablename__ = "installation"
    __table_args__ = (
        CheckConstraint('"only"', name="one_row"),
        {"comment": "One row: our id and the leader's epoch, by the manager; the hold, by provisioning/."},
    )

    only: Mapped[bool] = mapped_column(
        Boolean, primary_key=True, server_default=text("true"), comment="always true: there is one row"
    )
    id: Mapped[str] = mapped_column(comment="ten base32 characters, the same as in the cluster's Secret")
    epoch: Mapped[int] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="the leader's epoch; a write that carries another is refused",
    )
    held_since: Mapped[datetime | None] = mapped_column(
        comment="set while a cloud shows an attempt above our highest: until a person confirms"
    )
    held_reason: Mapped[str | None] = mapped_column(comment="what was seen, for the person who confirms")
    held_sequence: Mapped[int | None] = mapped_column(
        BigInteger, comment="the highest attempt without a row that was seen since; null: none was named"
    )
    confirmed_sequence: Mapped[int] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="attempts up to this one may lack a row: a person has looked at what there was",
    )
    cluster_uid: Mapped[str | None] = mapped_column(
        comment="uid of the cluster's kube-system namespace: a cloned cluster has another; by sweep/"
    )
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Claim(Base):
    """The NodeClaims as the watch showed them; a record for people and reports."""

    __tablename__ = "claim"
    __table_args__ = (
        Index(None, "pod_uid"),
        Index(None, "pool"),
        {"comment": "NodeClaims as the watch showed them, deleted ones too. Written by mirror/."},
    )

    uid: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    pod_namespace: Mapped[str]
    pod_name: Mapped[str]
    pod_uid: Mapped[str]
    pool: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    accelerator: Mapped[str] = mapped_column(comment="type:count as the user wrote it; empty for CPU only")
    workload_kind: Mapped[str] = mapped_column(
        server_default=text("''"), comment="of what controlled the Pod at placement, Pod for a bare one"
    )
    workload_name: Mapped[str] = mapped_column(server_default=text("''"))
    labels: Mapped[dict[str, Any]] = mapped_column(
        server_default=text("'{}'::jsonb"), comment="the Pod's labels at placement, without ours"
    )
    phase: Mapped[str]
    instance_id: Mapped[str | None]
    resource_version: Mapped[int] = mapped_column(
        BigInteger, comment="orders the watch's events: an older one never overwrites a newer"
    )
    created_at: Mapped[datetime] = mapped_column(comment="metadata.creationTimestamp")
    deleting_since: Mapped[datetime | None] = mapped_column(comment="metadata.deletionTimestamp")
    gone_at: Mapped[datetime | None] = mapped_column(comment="when the watch or a list showed it gone")
    mirrored_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Binding(Base):
    """The CloudPodBindings as the watch showed them."""

    __tablename__ = "binding"
    __table_args__ = (
        Index(None, "claim_name"),
        {"comment": "CloudPodBindings as the watch showed them, deleted ones too. Written by mirror/."},
    )

    uid: Mapped[str] = mapped_column(primary_key=True)
    namespace: Mapped[str]
    name: Mapped[str]
    claim_name: Mapped[str]
    pod_uid: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    external_name: Mapped[str | None] = mapped_column(comment="the machine's identity, once there is one")
    phase: Mapped[str]
    instance_id: Mapped[str | None]
    endpoint: Mapped[str | None]
    usd_per_hour: Mapped[Decimal | None]
    conditions: Mapped[list[Any]] = mapped_column(server_default=text("'[]'::jsonb"))
    resource_version: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    gone_at: Mapped[datetime | None]
    mirrored_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Rental(Base):
    """The life of one claim's machine: open, live, ending, ended; never backwards."""

    __tablename__ = "rental"
    __table_args__ = (
        CheckConstraint("state in ('open', 'live', 'ending', 'ended')", name="state"),
        CheckConstraint("(state = 'ended') = (ended_at is not null)", name="ended_has_time"),
        CheckConstraint("state <> 'live' or resource_id is not null", name="live_has_machine"),
        UniqueConstraint("provider", "account", "resource_id"),
        Index(None, "pod_uid"),
        Index("rental_not_ended_idx", "state", postgresql_where=text("state <> 'ended'")),
        {"comment": "One row a claim: may a machine be rented, and which one was. Written by provisioning/."},
    )

    claim_uid: Mapped[str] = mapped_column(primary_key=True)
    claim_name: Mapped[str]
    pod_namespace: Mapped[str]
    pod_name: Mapped[str]
    pod_uid: Mapped[str]
    pool: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str] = mapped_column(comment="the candidate's region token; the machine's own is in run")
    tier: Mapped[str]
    accelerator: Mapped[str]
    state: Mapped[str]
    epoch: Mapped[int] = mapped_column(BigInteger, comment="of the leader that wrote the row last")
    resource_id: Mapped[str | None] = mapped_column(comment="the one recorded machine, once live")
    resource_region: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    live_at: Mapped[datetime | None]
    ending_at: Mapped[datetime | None]
    ending_reason: Mapped[str | None] = mapped_column(comment="why release began, for reports")
    ended_at: Mapped[datetime | None]


class ProvisionAttempt(Base):
    """One intent to rent, committed before anything is sent."""

    __tablename__ = "provision_attempt"
    __table_args__ = (
        CheckConstraint(
            "outcome in ('accepted', 'found', 'rejected', 'avoided', 'throttled', 'unsent', 'absent')",
            name="outcome",
        ),
        CheckConstraint("(outcome is null) = (settled_at is null)", name="settled_has_time"),
        Index(None, "settled_at"),
        # A row rebuilt from a mark may carry a number that this database, restored, has given out again.
        Index(
            "provision_attempt_sequence_idx",
            "sequence",
            unique=True,
            postgresql_where=text("identity is not null"),
        ),
        UniqueConstraint("claim_uid", "sequence"),
        Index(
            "provision_attempt_one_unsettled_idx",
            "claim_uid",
            unique=True,
            postgresql_where=text("outcome is null and identity is not null"),
        ),
        {"comment": "Every intent to rent, written before it is sent. Written by provisioning/."},
    )

    claim_uid: Mapped[str] = mapped_column(
        ForeignKey("rental.claim_uid", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(Integer, primary_key=True, comment="1, 2, … within the claim")
    sequence: Mapped[int] = mapped_column(
        BigInteger, comment="rises across the installation; marked on the claim"
    )
    identity: Mapped[str | None] = mapped_column(
        comment="the machine's name; null when the row was rebuilt from the claim's mark"
    )
    request_hash: Mapped[str | None] = mapped_column(comment="sha256 of the exact request, secrets included")
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    accelerator: Mapped[str]
    shape: Mapped[str | None]
    ceiling_usd_per_hour: Mapped[Decimal | None] = mapped_column(
        comment="dollars an hour for the whole machine"
    )
    epoch: Mapped[int] = mapped_column(BigInteger)
    sends: Mapped[int] = mapped_column(
        SmallInteger,
        server_default=text("1"),
        comment="how often it may have been sent; a replay counts before it is",
    )
    send_by: Mapped[datetime] = mapped_column(comment="nothing of this attempt is sent after this moment")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    outcome: Mapped[str | None] = mapped_column(
        comment="null while unsettled: it may have taken effect; avoided: only one host refused"
    )
    settled_at: Mapped[datetime | None]
    rejection: Mapped[str | None] = mapped_column(
        comment="capacity, quota, auth, unsupported, invalid or price"
    )
    message: Mapped[str | None]


class Run(Base):
    """The facts of one machine that existed: what the ledger derives money from."""

    __tablename__ = "run"
    __table_args__ = (
        UniqueConstraint("claim_uid", "attempt"),
        UniqueConstraint("provider", "account", "resource_id"),
        CheckConstraint("usd_per_hour is null or usd_per_hour >= 0", name="price"),
        Index("run_open_idx", "provider", "account", postgresql_where=text("gone_at is null")),
        Index(None, "changed_at"),
        {"comment": "One row a machine that existed for a claim, both clocks. Written by provisioning/."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    claim_uid: Mapped[str]
    attempt: Mapped[int | None] = mapped_column(
        Integer, comment="provision_attempt.number; null for a second machine of one attempt"
    )
    provider: Mapped[str]
    account: Mapped[str]
    account_id: Mapped[str | None] = mapped_column(comment="the cloud's own id of the account that answered")
    resource_id: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    accelerator: Mapped[str]
    pool: Mapped[str]
    pod_namespace: Mapped[str]
    pod_name: Mapped[str]
    pod_uid: Mapped[str]
    meters: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"), comment="quoted: kind, quantity, usd a unit-hour as strings"
    )
    usd_per_hour: Mapped[Decimal | None] = mapped_column(
        comment="quoted, whole machine; null is unpriced, not free"
    )
    ceiling_usd_per_hour: Mapped[Decimal | None]
    clock_offset_s: Mapped[float | None] = mapped_column(
        comment="the provider's clock minus ours, when measured"
    )
    requested_at: Mapped[datetime | None] = mapped_column(comment="ours: the intent was committed")
    accepted_at: Mapped[datetime | None] = mapped_column(comment="ours: the create was answered")
    first_seen_at: Mapped[datetime | None] = mapped_column(comment="ours: a list or get showed it")
    running_at: Mapped[datetime | None] = mapped_column(comment="ours: first seen running")
    exited_at: Mapped[datetime | None] = mapped_column(comment="ours: its workload was first seen over")
    terminate_asked_at: Mapped[datetime | None] = mapped_column(
        comment="ours: a terminate was first accepted"
    )
    gone_at: Mapped[datetime | None] = mapped_column(comment="ours: proven gone")
    provider_created_at: Mapped[datetime | None]
    provider_started_at: Mapped[datetime | None]
    provider_ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    exit_code: Mapped[int | None] = mapped_column(Integer)
    extra: Mapped[bool] = mapped_column(
        Boolean,
        server_default=text("false"),
        comment="a second machine of its claim, ended as soon as it was seen",
    )
    repriced: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"),
        comment="other meters than quoted, as the cloud showed them: at (ours), meters; oldest first",
    )
    stops: Mapped[list[Any]] = mapped_column(
        server_default=text("'[]'::jsonb"),
        comment="ends of its workload that a restart undid: ended, again; oldest first",
    )
    changed_at: Mapped[datetime] = mapped_column(
        server_default=NOW, comment="when any column changed last; a trigger sets it"
    )
    source: Mapped[str] = mapped_column(
        server_default=text("'ordered'"),
        comment="ordered, or recovered: no order of it was on record, the store had lost rows",
    )


class Block(Base):
    """An offering that was refused a moment ago and is not tried again before ``expires_at``."""

    __tablename__ = "block"
    __table_args__ = (
        CheckConstraint(
            "everything = (accelerator is null and tier is null and region is null and host is null"
            " and template is null)",
            name="scope",
        ),
        Index(
            "block_scope_idx",
            "provider",
            "account",
            "accelerator",
            "tier",
            "region",
            "host",
            "template",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
        Index(None, "expires_at"),
        {"comment": "Refusals, live and lapsed. A null axis matches any value. Written by provisioning/."},
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    provider: Mapped[str]
    account: Mapped[str]
    accelerator: Mapped[str | None] = mapped_column(comment="type:count in lower case; empty: CPU only")
    tier: Mapped[str | None]
    region: Mapped[str | None]
    host: Mapped[str | None]
    template: Mapped[str | None] = mapped_column(
        comment="an invalid request blocks no offering: it blocks this owner's template until it changes"
    )
    everything: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    kind: Mapped[str] = mapped_column(
        comment="capacity, quota, auth, unsupported, invalid, price, unknown, or start: it came to nothing"
    )
    message: Mapped[str]
    pool: Mapped[str]
    pod_namespace: Mapped[str]
    pod_name: Mapped[str]
    claim_uid: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime] = mapped_column(comment="only ever moved later, but for a person's clear")


class OwnerBackoff(Base):
    """An owner whose Pods end by themselves, again and again: the next is not rented for before ``until``."""

    __tablename__ = "owner_backoff"
    __table_args__ = (
        CheckConstraint("failures > 0", name="failures"),
        Index(None, "until"),
        {
            "comment": "Crash loops on machines that cannot restart a workload. A row an owner's UID."
            " Written by provisioning/."
        },
    )

    owner_uid: Mapped[str] = mapped_column(primary_key=True)
    failures: Mapped[int] = mapped_column(
        Integer, comment="in a row, Pods that ran side by side counted once"
    )
    claim_uid: Mapped[str] = mapped_column(comment="of the machine whose end was counted last")
    message: Mapped[str] = mapped_column(comment="how the last one ended")
    failed_at: Mapped[datetime] = mapped_column(comment="when the last failure that counted was noted")
    until: Mapped[datetime] = mapped_column(comment="no machine is rented for the owner's Pods before")


class InstanceSeen(Base):
    """Every machine that a cloud has shown in an account of ours; changed only when the machine is."""

    __tablename__ = "instance_seen"
    __table_args__ = (
        Index(None, "claim_uid"),
        {
            "comment": "Machines that clouds have shown, ours and others', as last changed."
            " When one was last seen is the round's to say. Written by inventory/."
        },
    )

    provider: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(primary_key=True)
    resource_id: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str]
    account_id: Mapped[str | None]
    identity: Mapped[str | None] = mapped_column(comment="raw, as the cloud shows it")
    claim_uid: Mapped[str | None] = mapped_column(
        comment="parsed from identity, if it is this installation's"
    )
    attempt: Mapped[int | None] = mapped_column(Integer)
    sequence: Mapped[int | None] = mapped_column(BigInteger)
    state: Mapped[str]
    end_reason: Mapped[str | None]
    exit_code: Mapped[int | None] = mapped_column(Integer)
    endpoint: Mapped[str | None]
    host: Mapped[str | None]
    usd_per_hour: Mapped[Decimal | None] = mapped_column(comment="of the meters running now")
    provider_created_at: Mapped[datetime | None]
    first_seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    absent_since: Mapped[datetime | None] = mapped_column(comment="not in the complete lists since then")


class ListRound(Base):
    """A stretch of like rounds of one place: a row is extended while nothing changes."""

    __tablename__ = "list_round"
    __table_args__ = (
        Index(None, "provider", "account", "region", "began_at"),
        {
            "comment": "What asking a cloud gave: a row for each stretch of rounds with the same outcome."
            " Written by inventory/."
        },
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    provider: Mapped[str]
    account: Mapped[str]
    region: Mapped[str]
    complete: Mapped[bool] = mapped_column(Boolean)
    reason: Mapped[str | None] = mapped_column(comment="why it is not complete")
    account_id: Mapped[str | None]
    machines: Mapped[int] = mapped_column(Integer)
    rounds: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    began_at: Mapped[datetime] = mapped_column(comment="the first round of the stretch began")
    last_began_at: Mapped[datetime]
    last_ended_at: Mapped[datetime]


class PlacementDecision(Base):
    """One look at a gated Pod: what was chosen, and why everything else was not."""

    __tablename__ = "placement_decision"
    __table_args__ = (
        Index(None, "pod_uid"),
        Index(None, "decided_at"),
        {
            "comment": "One row a decision on a Pod: every candidate, its price, why it was skipped."
            " Written by placement/."
        },
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    pod_namespace: Mapped[str]
    pod_name: Mapped[str]
    pod_uid: Mapped[str]
    pool: Mapped[str | None]
    outcome: Mapped[str] = mapped_column(comment="placed, or the deferral's reason")
    claim_uid: Mapped[str | None]
    provider: Mapped[str | None]
    account: Mapped[str | None]
    region: Mapped[str | None]
    tier: Mapped[str | None]
    usd_per_hour: Mapped[Decimal | None]
    candidates: Mapped[list[Any]] = mapped_column(
        comment="in order: provider, account, region, tier, price, skip"
    )
    message: Mapped[str] = mapped_column(
        server_default=text("''"),
        comment="why no candidate was looked at, as the Pod was told; empty where candidates say it",
    )
    looks: Mapped[int] = mapped_column(
        Integer, server_default=text("1"), comment="how many equal looks in a row this row stands for"
    )
    decided_at: Mapped[datetime] = mapped_column(server_default=NOW)
    last_decided_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Reservation(Base):
    """What one claim takes from its pool's limits, promised before the claim exists."""

    __tablename__ = "reservation"
    __table_args__ = (
        CheckConstraint("gpus >= 0", name="gpus"),
        CheckConstraint("usd_per_hour is null or usd_per_hour >= 0", name="price"),
        Index(None, "pool"),
        {
            "comment": "What claims take from their pools' limits: written before the claim, gone with its"
            " end. Written by placement/."
        },
    )

    pod_uid: Mapped[str] = mapped_column(primary_key=True)
    claim_name: Mapped[str] = mapped_column(primary_key=True)
    namespace: Mapped[str] = mapped_column(server_default=text("''"), comment="the Pod's, for budgets")
    team: Mapped[str] = mapped_column(server_default=text("''"), comment="the Pod's team label, for budgets")
    labels: Mapped[dict[str, Any]] = mapped_column(
        JSONB,
        server_default=text("'{}'::jsonb"),
        comment="the Pod's labels as its claim keeps them, for budgets",
    )
    pool: Mapped[str]
    provider: Mapped[str]
    account: Mapped[str]
    gpus: Mapped[int] = mapped_column(Integer)
    usd_per_hour: Mapped[Decimal | None] = mapped_column(
        comment="at most, for the whole machine, until it is rented at a known price; null is unpriced"
    )
    claim_uid: Mapped[str | None] = mapped_column(
        comment="of a claim that was found rather than made; else the row is older than its claim"
    )
    created_at: Mapped[datetime] = mapped_column(
        server_default=NOW, comment="a rental that ended before then was an earlier claim's"
    )
