"""One more reason of a block: the machine was rented, and came to nothing at its start."""

from alembic import op

from app.store import views

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
min_reader = "0001"

BEFORE = "capacity, quota, auth, unsupported, invalid, price or unknown"
AFTER = "capacity, quota, auth, unsupported, invalid, price, unknown, or start: it came to nothing"


def upgrade() -> None:
    op.alter_column("block", "kind", comment=AFTER, existing_comment=BEFORE)


def downgrade() -> None:
    views.drop(op.get_bind())
    op.alter_column("block", "kind", comment=BEFORE, existing_comment=AFTER)
