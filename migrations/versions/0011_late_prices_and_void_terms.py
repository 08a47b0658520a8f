"""What stays unpriced once a price came late; prepayments noted by mistake; budgets by any label."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.store import views

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None
min_reader = "0001"

_NO_LABELS = sa.text("'{}'::jsonb")


def upgrade() -> None:
    # First, while nothing is locked yet that placement reads: it takes its time where there are many segments.
    op.create_index(
        "billing_segment_commitment_idx",
        "billing_segment",
        ["commitment_id"],
        postgresql_where=sa.text("commitment_id is not null"),
    )
    op.add_column(
        "billing_adjustment",
        sa.Column(
            "unpriced_seconds",
            sa.Numeric(),
            comment="more without a price, or fewer; null: all of its seconds where it has no dollars",
        ),
    )
    op.add_column(
        "billing_adjustment",
        sa.Column(
            "unpriced",
            postgresql.TSTZMULTIRANGE(),
            comment="what of its meter's frozen time has no price from here on; null: as before",
        ),
    )
    op.create_index(
        "billing_adjustment_unpriced_idx",
        "billing_adjustment",
        ["run_id", "meter", "id"],
        postgresql_where=sa.text(
            "unpriced is not null or (unpriced_seconds is null and dollar_seconds is not null"
            " and (kind = 'late_price' or (kind = 'late_fact' and seconds < 0)))"
        ),
    )
    for column in (
        sa.Column(
            "voided_at",
            sa.DateTime(timezone=True),
            comment="since when it counts as noted by mistake, and covers nothing; null: it holds",
        ),
        sa.Column("voided_by", sa.Text()),
        sa.Column("void_reason", sa.Text()),
        sa.Column(
            "reversed_at",
            sa.DateTime(timezone=True),
            comment="the instant in which a void one is taken off: that of its purchase, unless that was closed",
        ),
        sa.Column(
            "unused_reversed_at",
            sa.DateTime(timezone=True),
            comment="the same of what was unused, where the end of its term was closed; null: there is none of it",
        ),
    ):
        op.add_column("commitment", column)
    op.create_check_constraint(
        op.f("commitment_void_check"), "commitment", "(voided_at is null) = (reversed_at is null)"
    )
    op.add_column(
        "budget",
        sa.Column(
            "labels",
            postgresql.JSONB(),
            server_default=_NO_LABELS,
            nullable=False,
            comment="labels that the Pod must have, all of them",
        ),
    )
    op.alter_column("budget", "pool", comment="null: any; of all four nothing: everything")
    op.alter_column("budget", "action", comment="at the full amount; Alert for one with labels")
    op.add_column(
        "budget",
        sa.Column(
            "label_action",
            sa.Text(),
            comment="that of one with labels: versions before 0011 would take it for a budget of everything",
        ),
    )
    op.create_check_constraint(
        op.f("budget_label_action_check"),
        "budget",
        "case when labels = '{}'::jsonb then label_action is null else action = 'Alert' and label_action"
        " in ('Alert', 'RefuseNew', 'RefuseOnDemand', 'Drain') and label_action is not null end",
    )
    op.add_column(
        "reservation",
        sa.Column(
            "labels",
            postgresql.JSONB(),
            server_default=_NO_LABELS,
            nullable=False,
            comment="the Pod's labels as its claim keeps them, for budgets",
        ),
    )


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("select exists (select from commitment where voided_at is not null)")):
        raise RuntimeError("a prepayment is void, and would cover machines again: put a dump back instead")
    views.drop(op.get_bind())
    op.drop_column("reservation", "labels")
    op.execute("delete from budget where labels <> '{}'")  # without their labels they were for everything
    op.drop_constraint("budget_label_action_check", "budget")
    op.drop_column("budget", "label_action")
    op.alter_column("budget", "action", comment="at the full amount")
    op.alter_column("budget", "pool", comment="null: any; all three null: everything")
    op.drop_column("budget", "labels")
    op.drop_constraint("commitment_void_check", "commitment")
    for column in ("unused_reversed_at", "reversed_at", "void_reason", "voided_by", "voided_at"):
        op.drop_column("commitment", column)
    op.drop_index("billing_segment_commitment_idx", "billing_segment")
    op.drop_index("billing_adjustment_unpriced_idx", "billing_adjustment")
    op.drop_column("billing_adjustment", "unpriced")
    op.drop_column("billing_adjustment", "unpriced_seconds")
