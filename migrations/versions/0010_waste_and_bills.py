"""Which ended runs the waste counters have; when each account's bill was fetched."""

import sqlalchemy as sa
from alembic import op

from app.store import views

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
min_reader = "0001"


def upgrade() -> None:
    op.add_column(
        "ledger_run",
        sa.Column(
            "waste_at",
            sa.DateTime(timezone=True),
            comment="when its waste was added to the counters, once it was over",
        ),
    )
    op.create_index(
        "ledger_run_waste_idx",
        "ledger_run",
        ["run_id"],
        postgresql_where=sa.text("closed_at is not null and waste_at is null"),
    )
    op.add_column(
        "billing_rule",
        sa.Column("bill_at", sa.DateTime(timezone=True), comment="when its bill was fetched last"),
    )


def downgrade() -> None:
    views.drop(op.get_bind())
    op.drop_column("billing_rule", "bill_at")
    op.drop_index("ledger_run_waste_idx", table_name="ledger_run")
    op.drop_column("ledger_run", "waste_at")
