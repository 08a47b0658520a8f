"""Budgets: whose a reservation is; what the cost counters have shown."""

import sqlalchemy as sa
from alembic import op

from app.store import views

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
min_reader = "0001"


def upgrade() -> None:
    for name, comment in (
        ("namespace", "the Pod's, for budgets"),
        ("team", "the Pod's team label, for budgets"),
    ):
        column = sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False, comment=comment)
        op.add_column("reservation", column)
    op.create_table(
        "cost_counter",
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("provider", "nodepool", "namespace", "accelerator", "capacity_type")
        ),
        sa.Column("cost", sa.Numeric(), nullable=False, comment="dollars billed, credits not taken off"),
        sa.Column("list_cost", sa.Numeric(), nullable=False, comment="dollars as listed on demand"),
        sa.Column("gpu_seconds", sa.Numeric(), nullable=False),
        sa.PrimaryKeyConstraint(
            "provider",
            "nodepool",
            "namespace",
            "accelerator",
            "capacity_type",
            name=op.f("cost_counter_pkey"),
        ),
        comment="What the cost counters of /metrics show: they never fall. Written by ledger/.",
    )


def downgrade() -> None:
    views.drop(op.get_bind())
    op.drop_table("cost_counter")
    for name in ("namespace", "team"):
        op.drop_column("reservation", name)
