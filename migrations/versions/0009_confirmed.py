"""What a person has confirmed stays confirmed: up to which attempt machines may lack a row."""

import sqlalchemy as sa
from alembic import op

from app.store import views

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
min_reader = "0001"


def upgrade() -> None:
    op.add_column(
        "installation",
        sa.Column(
            "held_sequence",
            sa.BigInteger(),
            nullable=True,
            comment="the highest attempt without a row that was seen since; null: none was named",
        ),
    )
    op.add_column(
        "installation",
        sa.Column(
            "confirmed_sequence",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="attempts up to this one may lack a row: a person has looked at what there was",
        ),
    )


def downgrade() -> None:
    views.drop(op.get_bind())
    op.drop_column("installation", "confirmed_sequence")
    op.drop_column("installation", "held_sequence")
