"""The last output of ended workloads."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
min_reader = "0001"


def upgrade() -> None:
    op.create_table(
        "output_tail",
        sa.Column("pod_uid", sa.Text(), nullable=False, comment="whose output it is; one tail a Pod"),
        sa.Column("claim_uid", sa.Text(), nullable=False, comment="of the machine that wrote it"),
        sa.Column(
            "records",
            sa.LargeBinary(),
            nullable=False,
            comment="zlib: times, streams and bytes; see app.machines.tail",
        ),
        sa.Column(
            "size_bytes", sa.Integer(), nullable=False, comment="of records; their sum is what is bounded"
        ),
        sa.Column(
            "saved_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="the oldest go first when all are too many",
        ),
        sa.PrimaryKeyConstraint("pod_uid", name=op.f("output_tail_pkey")),
        comment="The last output of ended workloads, for kubectl logs. Written by provisioning/.",
    )
    op.create_index(op.f("output_tail_saved_at_idx"), "output_tail", ["saved_at"], unique=False)


def downgrade() -> None:
    op.drop_table("output_tail")
