"""The sweep's trail: findings and their history, sweeps, protections."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
min_reader = "0001"

TIME = sa.DateTime(timezone=True)
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


def upgrade() -> None:
    op.create_table(
        "orphan_finding",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column(
            "key", sa.Text(), nullable=False, comment="kind and what it is about: one open finding for each"
        ),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="no-claim, duplicate, terminating-slow, …; docs/orphans.md",
        ),
        sa.Column(
            "mark",
            sa.Text(),
            nullable=False,
            comment="reason and state: when it changes, sightings count anew",
        ),
        sa.Column("installation", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column(
            "resource_id", sa.Text(), nullable=True, comment="the machine's or part's; null: of a claim alone"
        ),
        sa.Column("identity", sa.Text(), nullable=True, comment="raw, as the cloud showed it"),
        sa.Column("claim_uid", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("provider_created_at", TIME, nullable=True, comment="as the cloud says, sane or not"),
        sa.Column("provider_state", sa.Text(), nullable=False),
        sa.Column(
            "exists_since",
            TIME,
            nullable=False,
            comment="its creation where the cloud's word is sane, else our first sight of it",
        ),
        sa.Column("usd_per_hour", sa.Numeric(), nullable=True, comment="null is unpriced, not free"),
        sa.Column("cost_so_far", sa.Numeric(), nullable=True, comment="dollars at that price; an estimate"),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column(
            "workload",
            sa.Text(),
            nullable=False,
            comment="the Pod it belongs or belonged to; empty: nobody knows",
        ),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("first_seen_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("last_seen_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "marked_at",
            TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="since then mark is the same",
        ),
        sa.Column(
            "sightings",
            sa.Integer(),
            server_default=sa.text("1"),
            nullable=False,
            comment="with the same mark",
        ),
        sa.Column(
            "decision", sa.Text(), nullable=False, comment="terminate, wait, blocked, report or protect"
        ),
        sa.Column(
            "decided_by",
            sa.Text(),
            nullable=False,
            comment="whose it is to act: sweep, provisioning, claims, person",
        ),
        sa.Column("blocked_by", sa.Text(), nullable=True, comment="the rail that holds it back"),
        sa.Column("eligible_at", TIME, nullable=True),
        sa.Column(
            "evidence",
            JSONB(),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
            comment="the rails, one by one, as last judged",
        ),
        sa.Column("approved_at", TIME, nullable=True),
        sa.Column("approved_by", sa.Text(), nullable=True),
        sa.Column("executed_at", TIME, nullable=True, comment="its end was last begun"),
        sa.Column(
            "tries",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="how often it was begun",
        ),
        sa.Column("provider_response", sa.Text(), nullable=True),
        sa.Column("gone_confirmed_at", TIME, nullable=True),
        sa.Column("resolved_at", TIME, nullable=True),
        sa.Column("resolved_as", sa.Text(), nullable=True, comment="gone, adopted, forgotten or cleared"),
        sa.CheckConstraint(
            "(resolved_at is null) = (resolved_as is null)", name=op.f("orphan_finding_resolved_check")
        ),
        sa.CheckConstraint(
            "usd_per_hour is null or usd_per_hour >= 0", name=op.f("orphan_finding_price_check")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("orphan_finding_pkey")),
        comment="Findings of the sweep, open and resolved; rows are never deleted. Written by sweep/.",
    )
    op.create_index(
        op.f("orphan_finding_first_seen_at_idx"), "orphan_finding", ["first_seen_at"], unique=False
    )
    op.create_index(
        "orphan_finding_open_idx",
        "orphan_finding",
        ["key"],
        unique=True,
        postgresql_where=sa.text("resolved_at is null"),
    )
    op.create_index(
        op.f("orphan_finding_provider_account_resource_id_idx"),
        "orphan_finding",
        ["provider", "account", "resource_id"],
        unique=False,
    )
    op.create_table(
        "protection",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("resource_id", sa.Text(), nullable=False),
        sa.Column("until", TIME, nullable=False, comment="the newest row of a machine counts"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("protection_pkey")),
        comment="Machines and parts that people keep from the sweep, each with an end. By commands.",
    )
    op.create_index(
        op.f("protection_provider_account_resource_id_idx"),
        "protection",
        ["provider", "account", "resource_id"],
        unique=False,
    )
    op.create_table(
        "sweep_run",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "version", sa.Text(), nullable=False, comment="of Nebula: the first hour of each is report-only"
        ),
        sa.Column("mode", sa.Text(), nullable=False, comment="sweep or report"),
        sa.Column(
            "report_only",
            ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="why nothing could be ended, each reason",
        ),
        sa.Column("leader", sa.Text(), nullable=False),
        sa.Column(
            "places",
            JSONB(),
            server_default=sa.text("'[]'::jsonb"),
            nullable=False,
            comment="each list: provider, account, region, machines, unknown",
        ),
        sa.Column("ours", sa.Integer(), nullable=False),
        sa.Column(
            "findings",
            JSONB(),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
            comment="how many of each kind",
        ),
        sa.Column(
            "others",
            JSONB(),
            server_default=sa.text("'[]'::jsonb"),
            nullable=False,
            comment="machines that are not ours: installation, count, price",
        ),
        sa.Column(
            "bounds",
            JSONB(),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
            comment="seconds within which an orphan ends, by account",
        ),
        sa.Column("terminated", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "blocked",
            JSONB(),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
            comment="how many findings each rail holds back",
        ),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("sweep_run_pkey")),
        comment="Sweeps: a row when the result changes, else every 15 min. Written by sweep/.",
    )
    op.create_index(op.f("sweep_run_started_at_idx"), "sweep_run", ["started_at"], unique=False)
    op.create_index(
        op.f("sweep_run_version_started_at_idx"), "sweep_run", ["version", "started_at"], unique=False
    )
    op.create_table(
        "orphan_event",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("finding_id", sa.BigInteger(), nullable=False),
        sa.Column("at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "what",
            sa.Text(),
            nullable=False,
            comment="found, decided, approved, executed, protected, resolved, …",
        ),
        sa.Column("by", sa.Text(), nullable=False, comment="controller, or the name of a person"),
        sa.Column("detail", JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.ForeignKeyConstraint(
            ["finding_id"], ["orphan_finding.id"], name=op.f("orphan_event_finding_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("orphan_event_pkey")),
        comment="History of findings; the database refuses updates and deletes. Written by sweep/.",
    )
    op.create_index(op.f("orphan_event_finding_id_idx"), "orphan_event", ["finding_id"], unique=False)
    op.add_column(
        "run",
        sa.Column(
            "source",
            sa.Text(),
            server_default=sa.text("'ordered'"),
            nullable=False,
            comment="ordered, or recovered: no order of it was on record, the store had lost rows",
        ),
    )
    op.add_column(
        "installation",
        sa.Column(
            "cluster_uid",
            sa.Text(),
            nullable=True,
            comment="uid of the cluster's kube-system namespace: a cloned cluster has another; by sweep/",
        ),
    )
    op.execute(KEEP_EVENTS)
    op.execute(KEEP_EVENTS_TRIGGER)


def downgrade() -> None:
    op.drop_table("orphan_event")
    op.execute("drop function refuse_change")
    op.drop_column("installation", "cluster_uid")
    op.drop_column("run", "source")
    op.drop_table("orphan_finding")
    op.drop_table("sweep_run")
    op.drop_table("protection")
