"""What a gated Pod was told, on decisions that looked at no candidate: `nebula why` shows it."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
min_reader = "0001"


def upgrade() -> None:
    op.add_column(
        "placement_decision",
        sa.Column(
            "message",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="why no candidate was looked at, as the Pod was told; empty where candidates say it",
        ),
    )


def downgrade() -> None:
    op.drop_column("placement_decision", "message")
