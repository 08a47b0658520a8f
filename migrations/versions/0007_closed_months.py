"""Closed months: frozen through and through, summed, archived; what a prepayment covers; kept counters."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, TSTZRANGE

from app.store import views

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
min_reader = "0001"

_FROZEN = """
create or replace function ledger_is_frozen() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and old.seconds = (
        select sum(a.seconds) from billing_segment_archive a where a.id = old.id and a.run_id = old.run_id
            and a.month between date_trunc('month', lower(old.period) at time zone 'UTC')::date
                and (upper(old.period) at time zone 'UTC')::date and a.period <@ old.period) then
        return old;
    end if;
    raise exception 'a closed segment is frozen: write an adjustment' using errcode = '23514';
end $$
"""
_FROZEN_BEFORE = """
create or replace function ledger_is_frozen() returns trigger language plpgsql as $$
begin
    raise exception 'a closed segment is frozen: write an adjustment' using errcode = '23514';
end $$
"""
_OPEN_MONTH = """
create function ledger_month_is_open() returns trigger language plpgsql as $$
declare
    begins timestamptz;
begin
    if tg_table_name = 'billing_segment' then begins := lower(new.period); else begins := new.at; end if;
    if begins < (select (max(month) + interval '1 month') at time zone 'UTC' from closed_month) then
        raise exception 'the month of % is closed: write an adjustment into an open one', begins
            using errcode = '23514';
    end if;
    return new;
end $$
"""
_TRIGGERS = (
    """create trigger billing_segment_archive_append_only before update or delete on billing_segment_archive
for each row execute function ledger_is_append_only()
""",
    """create trigger billing_segment_open_month before insert on billing_segment
for each row execute function ledger_month_is_open()
""",
    """create trigger billing_adjustment_open_month before insert on billing_adjustment
for each row execute function ledger_month_is_open()
""",
)
_SUMS = (
    "seconds",
    "gpu_seconds",
    "billed_dollar_seconds",
    "effective_dollar_seconds",
    "list_dollar_seconds",
    "guessed_dollar_seconds",
    "estimated_dollar_seconds",
    "unpriced_seconds",
)


def _text(name: str, comment: str | None = None, **rest: object) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, comment=comment, **rest)  # type: ignore[arg-type]


def _amount(name: str, comment: str | None = None, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.Numeric(), nullable=nullable, comment=comment)


def _now(name: str, comment: str | None = None) -> sa.Column[object]:
    return sa.Column(
        name,
        sa.DateTime(timezone=True),
        server_default=sa.text("now()"),
        nullable=False,
        comment=comment,
    )


def upgrade() -> None:
    _closed_months()
    _archive()
    _commitments()
    _metrics()
    op.execute(_FROZEN)
    op.execute(_OPEN_MONTH)
    for trigger in _TRIGGERS:
        op.execute(trigger)


def _closed_months() -> None:
    op.create_table(
        "closed_month",
        sa.Column("month", sa.Date(), nullable=False, comment="its first day"),
        _now("closed_at"),
        sa.Column("summed", sa.Boolean(), nullable=False, comment="whether cost_monthly has all of it"),
        sa.Column(
            "dropped",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="past retention: its segments are gone, its sums stay",
        ),
        sa.PrimaryKeyConstraint("month", name=op.f("closed_month_pkey")),
        comment="Closed months, UTC, one after another. Written by ledger/.",
    )
    # What was closed before, and what lay between. Runs that were open then are frozen up to its end now.
    op.execute("""
        insert into closed_month (month, closed_at, summed)
        select m.month::date, now(), false from (
            select min(month) as low, max(month) as high from billing_period_close) c,
            generate_series(c.low, c.high, interval '1 month') m (month)
    """)
    op.execute("""
        with end_ as (
            select (max(month) + interval '1 month') at time zone 'UTC' as at from closed_month
        ), across as materialized (
            select s.*, upper(s.period) as until, e.at from billing_segment s, end_ e
            where not s.frozen and lower(s.period) < e.at and (upper_inf(s.period) or upper(s.period) > e.at)
        ), cut as (
            update billing_segment s set period = tstzrange(lower(s.period), a.at) from across a
            where s.id = a.id returning s.id
        )
        insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
            price_source, confidence, why, commitment_id, gpus, frozen)
        select run_id, label_set_id, meter, phase, tstzrange(at, until), quantity, usd, list_usd,
            price_source, confidence, why, commitment_id, gpus, false
        from across where (select count(*) from cut) >= 0
    """)
    op.execute("""
        update billing_segment set frozen = true where not frozen and upper(period) <= (
            select (max(month) + interval '1 month') at time zone 'UTC' from closed_month)
    """)
    op.create_table(
        "cost_monthly",
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("label_set_id", sa.BigInteger(), nullable=False),
        _text("meter"),
        _text("phase"),
        _text("kind", "usage, or the kind of adjustments"),
        *(_amount(name) for name in _SUMS),
        sa.ForeignKeyConstraint(
            ["label_set_id"], ["label_set.id"], name=op.f("cost_monthly_label_set_id_fkey")
        ),
        sa.PrimaryKeyConstraint(
            "month", "label_set_id", "meter", "phase", "kind", name=op.f("cost_monthly_pkey")
        ),
        comment="Sums of closed UTC months; can be dropped and rebuilt. Written by ledger/.",
    )


def _archive() -> None:
    op.create_table(
        "billing_segment_archive",
        sa.Column("id", sa.BigInteger(), nullable=False, comment="as in billing_segment"),
        sa.Column(
            "month", sa.Date(), nullable=False, comment="the first day of the month in which all of it lies"
        ),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("label_set_id", sa.BigInteger(), nullable=False),
        _text("meter"),
        _text("phase"),
        sa.Column(
            "period",
            TSTZRANGE(),
            nullable=False,
            comment="cut at the edges of the month",
        ),
        _amount("quantity"),
        _amount("usd", nullable=True),
        _amount("list_usd", nullable=True),
        _text("price_source"),
        _text("confidence"),
        _text("why"),
        sa.Column("commitment_id", sa.BigInteger(), nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=False),
        _amount("seconds"),
        _amount("dollar_seconds", nullable=True),
        sa.PrimaryKeyConstraint("id", "month", name=op.f("billing_segment_archive_pkey")),
        comment="Segments of closed months, moved here whole. Never changed; a month is dropped as a"
        " partition. Written by ledger/.",
        postgresql_partition_by="RANGE (month)",
    )
    table = "billing_segment_archive"
    op.create_index(op.f("billing_segment_archive_run_id_idx"), table, ["run_id"])
    op.create_index(
        "billing_segment_archive_times_idx",
        table,
        [sa.text("lower(period)"), sa.text("upper(period)")],
        postgresql_using="brin",
    )
    op.create_index(
        "billing_segment_archive_unpriced_idx", table, ["run_id"], postgresql_where=sa.text("usd is null")
    )
    op.create_index(
        "billing_segment_archive_commitment_idx",
        table,
        ["commitment_id"],
        postgresql_where=sa.text("commitment_id is not null"),
    )
    op.add_column(
        "ledger_run",
        sa.Column(
            "dropped_at",
            sa.DateTime(timezone=True),
            comment="segments of it are past their retention: never derived again",
        ),
    )


def _commitments() -> None:
    for name, comment in (
        ("begun_at", "the machine's first instant, as derived"),
        ("over_at", "its last; null: it goes on"),
    ):
        op.add_column("ledger_run", sa.Column(name, sa.DateTime(timezone=True), comment=comment))
    op.add_column(
        "ledger_run",
        sa.Column(
            "covered",
            JSONB(),
            server_default=sa.text("'[]'::jsonb"),
            nullable=False,
            comment="by prepayments: commitment, start, end",
        ),
    )
    op.execute("""
        update ledger_run l set begun_at = s.low, over_at = case when not s.open then s.high end from (
            select run_id, min(lower(period)) as low, max(upper(period)) as high,
                bool_or(upper_inf(period)) as open from billing_segment group by run_id) s
        where s.run_id = l.run_id
    """)
    op.add_column(
        "commitment",
        sa.Column(
            "machines",
            sa.Integer(),
            comment="how many it covers at once; null: any number, until the amount is used",
        ),
    )
    op.create_check_constraint(op.f("commitment_machines_check"), "commitment", "machines > 0")
    op.add_column(
        "commitment",
        _now(
            "purchased_at",
            "the instant in which it is billed: its beginning, unless that is closed",
        ),
    )
    op.execute("update commitment set purchased_at = lower(valid)")


def _metrics() -> None:
    op.create_table(
        "shown_counter",
        _text("series"),
        sa.Column("labels", sa.ARRAY(sa.Text()), nullable=False, comment="values, in the series' order"),
        _amount("value"),
        sa.PrimaryKeyConstraint("series", "labels", name=op.f("shown_counter_pkey")),
        comment="What other counters of /metrics show: they never fall. Written by ledger/.",
    )
    op.create_table(
        "provider_balance",
        _text("provider"),
        _text("account"),
        _amount("usd", "left, as the cloud told it"),
        _amount("usd_per_hour", "what it says is being spent", nullable=True),
        _now("observed_at"),
        sa.PrimaryKeyConstraint("provider", "account", name=op.f("provider_balance_pkey")),
        comment="The newest balance of each account whose cloud tells one. Written by ledger/.",
    )


def downgrade() -> None:
    views.drop(op.get_bind())
    for table in ("billing_segment", "billing_adjustment"):
        op.execute(f"drop trigger {table}_open_month on {table}")
    op.execute("drop function ledger_month_is_open()")
    # What was archived goes back to where it came from.
    op.execute("""
        insert into billing_segment (run_id, label_set_id, meter, phase, period, quantity, usd, list_usd,
            price_source, confidence, why, commitment_id, gpus, frozen)
        select run_id, label_set_id, meter, phase, period, quantity, usd, list_usd, price_source, confidence,
            why, commitment_id, gpus, true from billing_segment_archive
    """)
    op.execute(_FROZEN_BEFORE)
    for name in (
        "provider_balance",
        "shown_counter",
        "billing_segment_archive",
        "cost_monthly",
        "closed_month",
    ):
        op.drop_table(name)
    for name in ("dropped_at", "begun_at", "over_at", "covered"):
        op.drop_column("ledger_run", name)
    for name in ("machines", "purchased_at"):
        op.drop_column("commitment", name)
