"""The first tables: claims, rentals, attempts, runs, blocks, what the clouds show, and decisions."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
min_reader = "0001"

TIME = sa.DateTime(timezone=True)
ATTEMPT_SEQUENCE = sa.Sequence("attempt_sequence", data_type=sa.BigInteger)


def upgrade() -> None:
    op.execute(CreateSequence(ATTEMPT_SEQUENCE))
    op.create_table(
        "binding",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("claim_name", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column(
            "external_name", sa.Text(), nullable=True, comment="the machine's identity, once there is one"
        ),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("usd_per_hour", sa.Numeric(), nullable=True),
        sa.Column("conditions", JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("resource_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("gone_at", TIME, nullable=True),
        sa.Column("mirrored_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("binding_pkey")),
        comment="CloudPodBindings as the watch showed them, deleted ones too. Written by mirror/.",
    )
    op.create_index(op.f("binding_claim_name_idx"), "binding", ["claim_name"], unique=False)
    op.create_table(
        "block",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column(
            "accelerator", sa.Text(), nullable=True, comment="type:count in lower case; empty: CPU only"
        ),
        sa.Column("tier", sa.Text(), nullable=True),
        sa.Column("region", sa.Text(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column(
            "template",
            sa.Text(),
            nullable=True,
            comment="an invalid request blocks no offering: it blocks this owner's template until it changes",
        ),
        sa.Column("everything", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="capacity, quota, auth, unsupported, invalid, price or unknown",
        ),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("pod_namespace", sa.Text(), nullable=False),
        sa.Column("pod_name", sa.Text(), nullable=False),
        sa.Column("claim_uid", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "expires_at", TIME, nullable=False, comment="only ever moved later, but for a person's clear"
        ),
        sa.CheckConstraint(
            "everything = (accelerator is null and tier is null and region "
            "is null and host is null and template is null)",
            name=op.f("block_scope_check"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("block_pkey")),
        comment="Refusals, live and lapsed. A null axis matches any value. Written by provisioning/.",
    )
    op.create_index(op.f("block_expires_at_idx"), "block", ["expires_at"], unique=False)
    op.create_index(
        "block_scope_idx",
        "block",
        ["provider", "account", "accelerator", "tier", "region", "host", "template"],
        unique=True,
        postgresql_nulls_not_distinct=True,
    )
    op.create_table(
        "claim",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pod_namespace", sa.Text(), nullable=False),
        sa.Column("pod_name", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column(
            "accelerator",
            sa.Text(),
            nullable=False,
            comment="type:count as the user wrote it; empty for CPU only",
        ),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True),
        sa.Column(
            "resource_version",
            sa.BigInteger(),
            nullable=False,
            comment="orders the watch's events: an older one never overwrites a newer",
        ),
        sa.Column("created_at", TIME, nullable=False, comment="metadata.creationTimestamp"),
        sa.Column("deleting_since", TIME, nullable=True, comment="metadata.deletionTimestamp"),
        sa.Column("gone_at", TIME, nullable=True, comment="when the watch or a list showed it gone"),
        sa.Column("mirrored_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("claim_pkey")),
        comment="NodeClaims as the watch showed them, deleted ones too. Written by mirror/.",
    )
    op.create_index(op.f("claim_pod_uid_idx"), "claim", ["pod_uid"], unique=False)
    op.create_index(op.f("claim_pool_idx"), "claim", ["pool"], unique=False)
    op.create_table(
        "installation",
        sa.Column(
            "only",
            sa.Boolean(),
            server_default=sa.text("true"),
            nullable=False,
            comment="always true: there is one row",
        ),
        sa.Column(
            "id",
            sa.Text(),
            nullable=False,
            comment="ten base32 characters, the same as in the cluster's Secret",
        ),
        sa.Column(
            "epoch",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="the leader's epoch; a write that carries another is refused",
        ),
        sa.Column(
            "held_since",
            TIME,
            nullable=True,
            comment="set while a cloud shows an attempt above our highest: until a person confirms",
        ),
        sa.Column(
            "held_reason", sa.Text(), nullable=True, comment="what was seen, for the person who confirms"
        ),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint('"only"', name=op.f("installation_one_row_check")),
        sa.PrimaryKeyConstraint("only", name=op.f("installation_pkey")),
        comment="One row: our id and the leader's epoch, by the manager; the hold, by provisioning/.",
    )
    op.create_table(
        "instance_seen",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("resource_id", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=True),
        sa.Column("identity", sa.Text(), nullable=True, comment="raw, as the cloud shows it"),
        sa.Column(
            "claim_uid",
            sa.Text(),
            nullable=True,
            comment="parsed from identity, if it is this installation's",
        ),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("sequence", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("usd_per_hour", sa.Numeric(), nullable=True, comment="of the meters running now"),
        sa.Column("provider_created_at", TIME, nullable=True),
        sa.Column("first_seen_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("changed_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("absent_since", TIME, nullable=True, comment="not in the complete lists since then"),
        sa.PrimaryKeyConstraint("provider", "account", "resource_id", name=op.f("instance_seen_pkey")),
        comment="Machines that clouds have shown, ours and others', as last changed. "
        "When one was last seen is the round's to say. Written by inventory/.",
    )
    op.create_index(op.f("instance_seen_claim_uid_idx"), "instance_seen", ["claim_uid"], unique=False)
    op.create_table(
        "list_round",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True, comment="why it is not complete"),
        sa.Column("account_id", sa.Text(), nullable=True),
        sa.Column("machines", sa.Integer(), nullable=False),
        sa.Column("rounds", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("began_at", TIME, nullable=False, comment="the first round of the stretch began"),
        sa.Column("last_began_at", TIME, nullable=False),
        sa.Column("last_ended_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("list_round_pkey")),
        comment="What asking a cloud gave: a row for each stretch of rounds with the "
        "same outcome. Written by inventory/.",
    )
    op.create_index(
        op.f("list_round_provider_account_region_began_at_idx"),
        "list_round",
        ["provider", "account", "region", "began_at"],
        unique=False,
    )
    op.create_table(
        "owner_backoff",
        sa.Column("owner_uid", sa.Text(), nullable=False),
        sa.Column(
            "failures",
            sa.Integer(),
            nullable=False,
            comment="in a row, Pods that ran side by side counted once",
        ),
        sa.Column(
            "claim_uid", sa.Text(), nullable=False, comment="of the machine whose end was counted last"
        ),
        sa.Column("message", sa.Text(), nullable=False, comment="how the last one ended"),
        sa.Column("failed_at", TIME, nullable=False, comment="when the last failure that counted was noted"),
        sa.Column("until", TIME, nullable=False, comment="no machine is rented for the owner's Pods before"),
        sa.CheckConstraint("failures > 0", name=op.f("owner_backoff_failures_check")),
        sa.PrimaryKeyConstraint("owner_uid", name=op.f("owner_backoff_pkey")),
        comment="Crash loops on machines that cannot restart a workload. A row an owner's UID. "
        "Written by provisioning/.",
    )
    op.create_index(op.f("owner_backoff_until_idx"), "owner_backoff", ["until"], unique=False)
    op.create_table(
        "placement_decision",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("pod_namespace", sa.Text(), nullable=False),
        sa.Column("pod_name", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False, comment="placed, or the deferral's reason"),
        sa.Column("claim_uid", sa.Text(), nullable=True),
        sa.Column("provider", sa.Text(), nullable=True),
        sa.Column("account", sa.Text(), nullable=True),
        sa.Column("region", sa.Text(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=True),
        sa.Column("usd_per_hour", sa.Numeric(), nullable=True),
        sa.Column(
            "candidates",
            JSONB(),
            nullable=False,
            comment="in order: provider, account, region, tier, price, skip",
        ),
        sa.Column(
            "looks",
            sa.Integer(),
            server_default=sa.text("1"),
            nullable=False,
            comment="how many equal looks in a row this row stands for",
        ),
        sa.Column("decided_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("last_decided_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("placement_decision_pkey")),
        comment="One row a decision on a Pod: every candidate, its price, why it was "
        "skipped. Written by placement/.",
    )
    op.create_index(
        op.f("placement_decision_decided_at_idx"), "placement_decision", ["decided_at"], unique=False
    )
    op.create_index(op.f("placement_decision_pod_uid_idx"), "placement_decision", ["pod_uid"], unique=False)
    op.create_table(
        "rental",
        sa.Column("claim_uid", sa.Text(), nullable=False),
        sa.Column("claim_name", sa.Text(), nullable=False),
        sa.Column("pod_namespace", sa.Text(), nullable=False),
        sa.Column("pod_name", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column(
            "region",
            sa.Text(),
            nullable=False,
            comment="the candidate's region token; the machine's own is in run",
        ),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("accelerator", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="of the leader that wrote the row last"),
        sa.Column("resource_id", sa.Text(), nullable=True, comment="the one recorded machine, once live"),
        sa.Column("resource_region", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("live_at", TIME, nullable=True),
        sa.Column("ending_at", TIME, nullable=True),
        sa.Column("ending_reason", sa.Text(), nullable=True, comment="why release began, for reports"),
        sa.Column("ended_at", TIME, nullable=True),
        sa.CheckConstraint(
            "(state = 'ended') = (ended_at is not null)", name=op.f("rental_ended_has_time_check")
        ),
        sa.CheckConstraint(
            "state <> 'live' or resource_id is not null", name=op.f("rental_live_has_machine_check")
        ),
        sa.CheckConstraint("state in ('open', 'live', 'ending', 'ended')", name=op.f("rental_state_check")),
        sa.PrimaryKeyConstraint("claim_uid", name=op.f("rental_pkey")),
        sa.UniqueConstraint(
            "provider", "account", "resource_id", name=op.f("rental_provider_account_resource_id_key")
        ),
        comment="One row a claim: may a machine be rented, and which one was. Written by provisioning/.",
    )
    op.create_index(
        "rental_not_ended_idx",
        "rental",
        ["state"],
        unique=False,
        postgresql_where=sa.text("state <> 'ended'"),
    )
    op.create_index(op.f("rental_pod_uid_idx"), "rental", ["pod_uid"], unique=False)
    op.create_table(
        "reservation",
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("claim_name", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column(
            "usd_per_hour",
            sa.Numeric(),
            nullable=True,
            comment="at most, for the whole machine, until it is rented at a known price; null is unpriced",
        ),
        sa.Column(
            "claim_uid",
            sa.Text(),
            nullable=True,
            comment="of a claim that was found rather than made; else the row is older than its claim",
        ),
        sa.Column(
            "created_at",
            TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="a rental that ended before then was an earlier claim's",
        ),
        sa.CheckConstraint("gpus >= 0", name=op.f("reservation_gpus_check")),
        sa.CheckConstraint("usd_per_hour is null or usd_per_hour >= 0", name=op.f("reservation_price_check")),
        sa.PrimaryKeyConstraint("pod_uid", "claim_name", name=op.f("reservation_pkey")),
        comment="What claims take from their pools' limits: written before the claim, gone with its end."
        " Written by placement/.",
    )
    op.create_index(op.f("reservation_pool_idx"), "reservation", ["pool"], unique=False)
    op.create_table(
        "run",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("claim_uid", sa.Text(), nullable=False),
        sa.Column(
            "attempt",
            sa.Integer(),
            nullable=True,
            comment="provision_attempt.number; null for a second machine of one attempt",
        ),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column(
            "account_id", sa.Text(), nullable=True, comment="the cloud's own id of the account that answered"
        ),
        sa.Column("resource_id", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("accelerator", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("pod_namespace", sa.Text(), nullable=False),
        sa.Column("pod_name", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column(
            "meters",
            JSONB(),
            server_default=sa.text("'[]'::jsonb"),
            nullable=False,
            comment="quoted: kind, quantity, usd a unit-hour as strings",
        ),
        sa.Column(
            "usd_per_hour",
            sa.Numeric(),
            nullable=True,
            comment="quoted, whole machine; null is unpriced, not free",
        ),
        sa.Column("ceiling_usd_per_hour", sa.Numeric(), nullable=True),
        sa.Column(
            "clock_offset_s",
            sa.Double(),
            nullable=True,
            comment="the provider's clock minus ours, when measured",
        ),
        sa.Column("requested_at", TIME, nullable=True, comment="ours: the intent was committed"),
        sa.Column("accepted_at", TIME, nullable=True, comment="ours: the create was answered"),
        sa.Column("first_seen_at", TIME, nullable=True, comment="ours: a list or get showed it"),
        sa.Column("running_at", TIME, nullable=True, comment="ours: first seen running"),
        sa.Column("exited_at", TIME, nullable=True, comment="ours: its workload was first seen over"),
        sa.Column("terminate_asked_at", TIME, nullable=True, comment="ours: a terminate was first accepted"),
        sa.Column("gone_at", TIME, nullable=True, comment="ours: proven gone"),
        sa.Column("provider_created_at", TIME, nullable=True),
        sa.Column("provider_started_at", TIME, nullable=True),
        sa.Column("provider_ended_at", TIME, nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column(
            "extra",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="a second machine of its claim, ended as soon as it was seen",
        ),
        sa.CheckConstraint("usd_per_hour is null or usd_per_hour >= 0", name=op.f("run_price_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("run_pkey")),
        sa.UniqueConstraint("claim_uid", "attempt", name=op.f("run_claim_uid_attempt_key")),
        sa.UniqueConstraint(
            "provider", "account", "resource_id", name=op.f("run_provider_account_resource_id_key")
        ),
        comment="One row a machine that existed for a claim, both clocks. Written by provisioning/.",
    )
    op.create_index(
        "run_open_idx",
        "run",
        ["provider", "account"],
        unique=False,
        postgresql_where=sa.text("gone_at is null"),
    )
    op.create_table(
        "schema_revision",
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column(
            "min_reader",
            sa.Text(),
            nullable=False,
            comment="code that does not know this revision yet must not use the database",
        ),
        sa.Column("applied_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("min_reader <= revision", name=op.f("schema_revision_min_reader_check")),
        sa.PrimaryKeyConstraint("revision", name=op.f("schema_revision_pkey")),
        comment="Revisions applied, and the oldest code that each allows. Written by migrations.",
    )
    op.create_table(
        "provision_attempt",
        sa.Column("claim_uid", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="1, 2, … within the claim"),
        sa.Column(
            "sequence",
            sa.BigInteger(),
            nullable=False,
            comment="rises across the installation; marked on the claim",
        ),
        sa.Column(
            "identity",
            sa.Text(),
            nullable=True,
            comment="the machine's name; null when the row was rebuilt from the claim's mark",
        ),
        sa.Column(
            "request_hash", sa.Text(), nullable=True, comment="sha256 of the exact request, secrets included"
        ),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("accelerator", sa.Text(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=True),
        sa.Column(
            "ceiling_usd_per_hour",
            sa.Numeric(),
            nullable=True,
            comment="dollars an hour for the whole machine",
        ),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column(
            "sends",
            sa.SmallInteger(),
            server_default=sa.text("1"),
            nullable=False,
            comment="how often it may have been sent; a replay counts before it is",
        ),
        sa.Column(
            "send_by", TIME, nullable=False, comment="nothing of this attempt is sent after this moment"
        ),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "outcome",
            sa.Text(),
            nullable=True,
            comment="null while unsettled: it may have taken effect; avoided: only one host refused",
        ),
        sa.Column("settled_at", TIME, nullable=True),
        sa.Column(
            "rejection",
            sa.Text(),
            nullable=True,
            comment="capacity, quota, auth, unsupported, invalid or price",
        ),
        sa.Column("message", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "outcome in ('accepted', 'found', 'rejected', 'avoided', 'throttled', 'unsent', 'absent')",
            name=op.f("provision_attempt_outcome_check"),
        ),
        sa.CheckConstraint(
            "(outcome is null) = (settled_at is null)", name=op.f("provision_attempt_settled_has_time_check")
        ),
        sa.ForeignKeyConstraint(
            ["claim_uid"],
            ["rental.claim_uid"],
            name=op.f("provision_attempt_claim_uid_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("claim_uid", "number", name=op.f("provision_attempt_pkey")),
        sa.UniqueConstraint("claim_uid", "sequence", name=op.f("provision_attempt_claim_uid_sequence_key")),
        comment="Every intent to rent, written before it is sent. Written by provisioning/.",
    )
    op.create_index(
        op.f("provision_attempt_settled_at_idx"), "provision_attempt", ["settled_at"], unique=False
    )
    op.create_index(
        "provision_attempt_sequence_idx",
        "provision_attempt",
        ["sequence"],
        unique=True,
        postgresql_where=sa.text("identity is not null"),
    )
    op.create_index(
        "provision_attempt_one_unsettled_idx",
        "provision_attempt",
        ["claim_uid"],
        unique=True,
        postgresql_where=sa.text("outcome is null and identity is not null"),
    )


def downgrade() -> None:
    op.drop_table("provision_attempt")
    op.drop_table("schema_revision")
    op.drop_table("run")
    op.drop_table("reservation")
    op.drop_table("rental")
    op.drop_table("placement_decision")
    op.drop_table("owner_backoff")
    op.drop_table("list_round")
    op.drop_table("instance_seen")
    op.drop_table("installation")
    op.drop_table("claim")
    op.drop_table("block")
    op.drop_table("binding")
    op.execute(DropSequence(ATTEMPT_SEQUENCE))
