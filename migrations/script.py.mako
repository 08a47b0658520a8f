"""${message}."""

from alembic import op
import sqlalchemy as sa

revision = "${up_revision}"
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None
min_reader = ${repr(down_revision)}  # raise it when code that knows only older revisions would misread rows


def upgrade() -> None:
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade() -> None:
    ${downgrades if downgrades else "raise NotImplementedError"}
