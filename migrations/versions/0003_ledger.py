"""The ledger: attribution, prices, segments, adjustments, bills, budgets; what runs must remember for it."""

from alembic import op
from sqlalchemy import text

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
min_reader = "0001"

_TABLES = (
    """
CREATE TABLE billing_rule (
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    rules JSONB NOT NULL,
    bills BOOLEAN NOT NULL,
    observed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT billing_rule_pkey PRIMARY KEY (provider, account)
)
    """,
    """
COMMENT ON TABLE billing_rule IS 'One row a provider account: its adapter''s rules. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN billing_rule.rules IS 'kind (null: all others), starts, until, step_s, minimum_s, reclaim_free_s, stopped_times'
    """,
    """
COMMENT ON COLUMN billing_rule.bills IS 'whether the cloud tells afterwards what it charged'
    """,
    """
CREATE TABLE budget (
    name TEXT NOT NULL,
    namespace TEXT,
    team TEXT,
    pool TEXT,
    amount_usd NUMERIC NOT NULL,
    period TEXT NOT NULL,
    thresholds INTEGER[] NOT NULL,
    action TEXT NOT NULL,
    look_ahead_s INTEGER NOT NULL,
    set_by TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT budget_pkey PRIMARY KEY (name),
    CONSTRAINT budget_amount_check CHECK (amount_usd > 0),
    CONSTRAINT budget_period_check CHECK (period in ('day', 'week', 'month', 'total')),
    CONSTRAINT budget_action_check CHECK (action in ('Alert', 'RefuseNew', 'RefuseOnDemand', 'Drain')),
    CONSTRAINT budget_look_ahead_check CHECK (look_ahead_s >= 0)
)
    """,
    """
COMMENT ON TABLE budget IS 'Budgets, those of NodePools among them. Written by ledger/ and nebula budget.'
    """,
    """
COMMENT ON COLUMN budget.name IS 'nodepool/NAME for that of a NodePool'
    """,
    """
COMMENT ON COLUMN budget.namespace IS 'null: any'
    """,
    """
COMMENT ON COLUMN budget.team IS 'null: any'
    """,
    """
COMMENT ON COLUMN budget.pool IS 'null: any; all three null: everything'
    """,
    """
COMMENT ON COLUMN budget.amount_usd IS 'dollars in a period'
    """,
    """
COMMENT ON COLUMN budget.period IS 'day, week (from Monday), month or total, UTC'
    """,
    """
COMMENT ON COLUMN budget.thresholds IS 'percentages that are told of'
    """,
    """
COMMENT ON COLUMN budget.action IS 'at the full amount'
    """,
    """
COMMENT ON COLUMN budget.look_ahead_s IS 'what runs and what is promised counts for so much longer'
    """,
    """
CREATE TABLE cost_day (
    day DATE NOT NULL,
    dirty BOOLEAN NOT NULL,
    sealed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT cost_day_pkey PRIMARY KEY (day)
)
    """,
    """
COMMENT ON TABLE cost_day IS 'Sealed UTC days; a dirty one is not read. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN cost_day.dirty IS 'something in it changed: add it up again'
    """,
    """
CREATE TABLE label_set (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    hash TEXT NOT NULL,
    namespace TEXT NOT NULL,
    workload_kind TEXT NOT NULL,
    workload_name TEXT NOT NULL,
    team TEXT NOT NULL,
    cost_center TEXT NOT NULL,
    pool TEXT NOT NULL,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    account_id TEXT NOT NULL,
    region TEXT NOT NULL,
    sku TEXT NOT NULL,
    tier TEXT NOT NULL,
    accelerator TEXT NOT NULL,
    accelerator_count INTEGER NOT NULL,
    tags JSONB DEFAULT '{}'::jsonb NOT NULL,
    CONSTRAINT label_set_pkey PRIMARY KEY (id),
    CONSTRAINT label_set_hash_key UNIQUE (hash)
)
    """,
    """
COMMENT ON TABLE label_set IS 'One row for each distinct attribution. Never changed. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN label_set.hash IS 'of all other columns: equal attributions share a row'
    """,
    """
COMMENT ON COLUMN label_set.namespace IS 'of the Pod; empty: nobody''s, a machine without a claim'
    """,
    """
COMMENT ON COLUMN label_set.workload_kind IS 'of what controls the Pod, Pod for a bare one'
    """,
    """
COMMENT ON COLUMN label_set.team IS 'the Pod''s team label; empty without one'
    """,
    """
COMMENT ON COLUMN label_set.cost_center IS 'the Pod''s cost centre label; empty without one'
    """,
    """
COMMENT ON COLUMN label_set.account_id IS 'the cloud''s own id of the account; empty if not told'
    """,
    """
COMMENT ON COLUMN label_set.region IS 'the machine''s own'
    """,
    """
COMMENT ON COLUMN label_set.sku IS 'the cloud''s id of the shape; empty if not known'
    """,
    """
COMMENT ON COLUMN label_set.tier IS 'Spot or OnDemand, as it was bought'
    """,
    """
COMMENT ON COLUMN label_set.accelerator IS 'empty: none'
    """,
    """
COMMENT ON COLUMN label_set.tags IS 'the Pod''s own labels, flat'
    """,
    """
CREATE TABLE price_override (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    sku TEXT NOT NULL,
    tier TEXT NOT NULL,
    usd_per_hour NUMERIC NOT NULL,
    currency TEXT DEFAULT 'USD' NOT NULL,
    valid TSTZRANGE NOT NULL,
    set_by TEXT NOT NULL,
    reason TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT price_override_pkey PRIMARY KEY (id),
    CONSTRAINT price_override_one_price_excl EXCLUDE USING gist (provider WITH =, account WITH =, sku WITH =, tier WITH =, valid WITH &&),
    CONSTRAINT price_override_usd_check CHECK (usd_per_hour >= 0),
    CONSTRAINT price_override_currency_check CHECK (currency = 'USD'),
    CONSTRAINT price_override_valid_check CHECK (not isempty(valid) and not lower_inf(valid))
)
    """,
    """
COMMENT ON TABLE price_override IS 'Prices that people have set: used exactly, zero too. Written by nebula cost override.'
    """,
    """
COMMENT ON COLUMN price_override.account IS '* for every account of the provider'
    """,
    """
COMMENT ON COLUMN price_override.sku IS '* for every shape; else the cloud''s id or type:count'
    """,
    """
COMMENT ON COLUMN price_override.tier IS '* for both'
    """,
    """
COMMENT ON COLUMN price_override.usd_per_hour IS 'for the whole machine'
    """,
    """
CREATE TABLE price_point (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    sku TEXT NOT NULL,
    region TEXT NOT NULL,
    tier TEXT NOT NULL,
    meter TEXT NOT NULL,
    unit TEXT NOT NULL,
    quantity NUMERIC NOT NULL,
    usd NUMERIC,
    currency TEXT DEFAULT 'USD' NOT NULL,
    valid TSTZRANGE NOT NULL,
    source TEXT NOT NULL,
    observed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT price_point_pkey PRIMARY KEY (id),
    CONSTRAINT price_point_one_price_excl EXCLUDE USING gist (provider WITH =, account WITH =, sku WITH =, region WITH =, tier WITH =, meter WITH =, valid WITH &&),
    CONSTRAINT price_point_usd_check CHECK (usd is null or usd >= 0),
    CONSTRAINT price_point_currency_check CHECK (currency = 'USD'),
    CONSTRAINT price_point_valid_check CHECK (not isempty(valid))
)
    """,
    """
CREATE INDEX price_point_listed_idx ON price_point (provider, account, sku, region, tier) WHERE upper_inf(valid)
    """,
    """
COMMENT ON TABLE price_point IS 'What clouds and the catalogue list, each price with its time. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN price_point.sku IS 'the cloud''s id of the shape'
    """,
    """
COMMENT ON COLUMN price_point.meter IS 'kind, or kind:label'
    """,
    """
COMMENT ON COLUMN price_point.unit IS 'unit-hour, or GiB for bytes'
    """,
    """
COMMENT ON COLUMN price_point.quantity IS 'how many units the shape has'
    """,
    """
COMMENT ON COLUMN price_point.usd IS 'dollars a unit; null: listed without a price'
    """,
    """
COMMENT ON COLUMN price_point.valid IS 'unbounded above: listed now'
    """,
    """
COMMENT ON COLUMN price_point.source IS 'catalog: the file''s row or the cloud''s own list'
    """,
    """
COMMENT ON COLUMN price_point.observed_at IS 'when it was seen last'
    """,
    """
CREATE TABLE provider_bill_line (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    resource_id TEXT NOT NULL,
    meter TEXT NOT NULL,
    starts_at TIMESTAMP WITH TIME ZONE NOT NULL,
    ends_at TIMESTAMP WITH TIME ZONE NOT NULL,
    usd NUMERIC NOT NULL,
    currency TEXT DEFAULT 'USD' NOT NULL,
    identity TEXT,
    claim_uid TEXT,
    final BOOLEAN NOT NULL,
    fetched_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT provider_bill_line_pkey PRIMARY KEY (id),
    CONSTRAINT provider_bill_line_provider_account_resource_id_meter_s_d406 UNIQUE (provider, account, resource_id, meter, starts_at, ends_at),
    CONSTRAINT provider_bill_line_currency_check CHECK (currency = 'USD'),
    CONSTRAINT provider_bill_line_period_check CHECK (ends_at >= starts_at)
)
    """,
    """
COMMENT ON TABLE provider_bill_line IS 'The clouds'' own bills, each line once. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN provider_bill_line.resource_id IS 'empty: of the account as a whole'
    """,
    """
COMMENT ON COLUMN provider_bill_line.meter IS 'empty: of all meters together'
    """,
    """
COMMENT ON COLUMN provider_bill_line.starts_at IS 'the cloud''s clock'
    """,
    """
COMMENT ON COLUMN provider_bill_line.identity IS 'our name, where the bill carries it'
    """,
    """
COMMENT ON COLUMN provider_bill_line.claim_uid IS 'parsed from identity, if it is ours'
    """,
    """
COMMENT ON COLUMN provider_bill_line.final IS 'the cloud does not change it any more'
    """,
    """
CREATE TABLE billing_period_close (
    month DATE NOT NULL,
    label_set_id BIGINT NOT NULL,
    billed_dollar_seconds NUMERIC NOT NULL,
    effective_dollar_seconds NUMERIC NOT NULL,
    list_dollar_seconds NUMERIC NOT NULL,
    unpriced_seconds NUMERIC NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT billing_period_close_pkey PRIMARY KEY (month, label_set_id),
    CONSTRAINT billing_period_close_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id)
)
    """,
    """
COMMENT ON TABLE billing_period_close IS 'Totals of closed months, UTC; never changed. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN billing_period_close.month IS 'its first day'
    """,
    """
CREATE TABLE budget_told (
    budget TEXT NOT NULL,
    period_start TIMESTAMP WITH TIME ZONE NOT NULL,
    threshold INTEGER NOT NULL,
    told_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT budget_told_pkey PRIMARY KEY (budget, period_start, threshold),
    CONSTRAINT budget_told_budget_fkey FOREIGN KEY(budget) REFERENCES budget (name) ON DELETE CASCADE
)
    """,
    """
COMMENT ON TABLE budget_told IS 'Thresholds passed, one row each. Written by ledger/.'
    """,
    """
CREATE TABLE commitment (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    sku TEXT NOT NULL,
    tier TEXT NOT NULL,
    amount_usd NUMERIC NOT NULL,
    usd_per_hour NUMERIC NOT NULL,
    currency TEXT DEFAULT 'USD' NOT NULL,
    valid TSTZRANGE NOT NULL,
    label_set_id BIGINT NOT NULL,
    set_by TEXT NOT NULL,
    reason TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT commitment_pkey PRIMARY KEY (id),
    CONSTRAINT commitment_usd_check CHECK (amount_usd >= 0 and usd_per_hour >= 0),
    CONSTRAINT commitment_currency_check CHECK (currency = 'USD'),
    CONSTRAINT commitment_valid_check CHECK (not isempty(valid) and not lower_inf(valid) and not upper_inf(valid)),
    CONSTRAINT commitment_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id)
)
    """,
    """
COMMENT ON TABLE commitment IS 'Prepayments and reservations. Written by nebula cost commitment.'
    """,
    """
COMMENT ON COLUMN commitment.sku IS 'what it covers: * for every shape; else its id or type:count'
    """,
    """
COMMENT ON COLUMN commitment.tier IS '* for both'
    """,
    """
COMMENT ON COLUMN commitment.amount_usd IS 'paid, once, when the term begins'
    """,
    """
COMMENT ON COLUMN commitment.usd_per_hour IS 'what an hour of a covered machine takes from the amount'
    """,
    """
COMMENT ON COLUMN commitment.valid IS 'the term'
    """,
    """
COMMENT ON COLUMN commitment.label_set_id IS 'nobody''s, of that account'
    """,
    """
CREATE TABLE cost_daily (
    day DATE NOT NULL,
    label_set_id BIGINT NOT NULL,
    meter TEXT NOT NULL,
    phase TEXT NOT NULL,
    kind TEXT NOT NULL,
    seconds NUMERIC NOT NULL,
    gpu_seconds NUMERIC NOT NULL,
    billed_dollar_seconds NUMERIC NOT NULL,
    effective_dollar_seconds NUMERIC NOT NULL,
    list_dollar_seconds NUMERIC NOT NULL,
    guessed_dollar_seconds NUMERIC NOT NULL,
    estimated_dollar_seconds NUMERIC NOT NULL,
    unpriced_seconds NUMERIC NOT NULL,
    CONSTRAINT cost_daily_pkey PRIMARY KEY (day, label_set_id, meter, phase, kind),
    CONSTRAINT cost_daily_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id)
)
    """,
    """
COMMENT ON TABLE cost_daily IS 'Sums of sealed UTC days; can be dropped and rebuilt. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN cost_daily.kind IS 'usage, or the kind of adjustments'
    """,
    """
CREATE TABLE ledger_run (
    run_id BIGINT NOT NULL,
    label_set_id BIGINT NOT NULL,
    facts_at TIMESTAMP WITH TIME ZONE NOT NULL,
    prices_at TIMESTAMP WITH TIME ZONE NOT NULL,
    derived_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    billed_at TIMESTAMP WITH TIME ZONE,
    rules JSONB NOT NULL,
    CONSTRAINT ledger_run_pkey PRIMARY KEY (run_id),
    CONSTRAINT ledger_run_run_id_fkey FOREIGN KEY(run_id) REFERENCES run (id) ON DELETE RESTRICT,
    CONSTRAINT ledger_run_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id)
)
    """,
    """
CREATE INDEX ledger_run_open_idx ON ledger_run (run_id) WHERE closed_at is null
    """,
    """
CREATE INDEX ledger_run_unbilled_idx ON ledger_run (closed_at) WHERE billed_at is null
    """,
    """
COMMENT ON TABLE ledger_run IS 'One row a run that has been derived. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN ledger_run.facts_at IS 'run.changed_at of the facts that were read'
    """,
    """
COMMENT ON COLUMN ledger_run.prices_at IS 'when overrides and prepayments were read'
    """,
    """
COMMENT ON COLUMN ledger_run.closed_at IS 'its segments are frozen: from then on there are adjustments only'
    """,
    """
COMMENT ON COLUMN ledger_run.ended_at IS 'the last billed instant of a closed run'
    """,
    """
COMMENT ON COLUMN ledger_run.billed_at IS 'its cloud''s own, final bill was compared with it'
    """,
    """
COMMENT ON COLUMN ledger_run.rules IS 'the cloud''s billing rules that were used'
    """,
    """
CREATE TABLE billing_adjustment (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    key TEXT NOT NULL,
    run_id BIGINT,
    label_set_id BIGINT NOT NULL,
    meter TEXT DEFAULT '' NOT NULL,
    phase TEXT DEFAULT '' NOT NULL,
    kind TEXT NOT NULL,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    seconds NUMERIC DEFAULT 0 NOT NULL,
    dollar_seconds NUMERIC,
    list_dollar_seconds NUMERIC,
    commitment_id BIGINT,
    currency TEXT DEFAULT 'USD' NOT NULL,
    corrects DATE,
    invoice TEXT,
    reason TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT billing_adjustment_pkey PRIMARY KEY (id),
    CONSTRAINT billing_adjustment_key_key UNIQUE (key),
    CONSTRAINT billing_adjustment_kind_check CHECK (kind in ('rounding', 'minimum', 'spot_interrupt_free', 'late_price', 'late_fact', 'invoice_true_up', 'credit', 'refund', 'tax')),
    CONSTRAINT billing_adjustment_currency_check CHECK (currency = 'USD'),
    CONSTRAINT billing_adjustment_run_id_fkey FOREIGN KEY(run_id) REFERENCES run (id) ON DELETE RESTRICT,
    CONSTRAINT billing_adjustment_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id),
    CONSTRAINT billing_adjustment_commitment_id_fkey FOREIGN KEY(commitment_id) REFERENCES commitment (id)
)
    """,
    """
CREATE INDEX billing_adjustment_instant_idx ON billing_adjustment USING gist (tstzrange(at, at, '[]'))
    """,
    """
CREATE INDEX billing_adjustment_run_id_idx ON billing_adjustment (run_id)
    """,
    """
COMMENT ON TABLE billing_adjustment IS 'Signed amounts beside the segments; only ever added. Written by ledger/ and people.'
    """,
    """
COMMENT ON COLUMN billing_adjustment.key IS 'what it is for: the same correction is never written twice'
    """,
    """
COMMENT ON COLUMN billing_adjustment.at IS 'the instant in which all of it counts'
    """,
    """
COMMENT ON COLUMN billing_adjustment.seconds IS 'billed more, or less'
    """,
    """
COMMENT ON COLUMN billing_adjustment.dollar_seconds IS 'null: there is no price'
    """,
    """
COMMENT ON COLUMN billing_adjustment.commitment_id IS 'it is covered by: billed nothing here'
    """,
    """
COMMENT ON COLUMN billing_adjustment.corrects IS 'the first day of the closed month that it corrects; null within an open one'
    """,
    """
CREATE TABLE billing_segment (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    run_id BIGINT NOT NULL,
    label_set_id BIGINT NOT NULL,
    meter TEXT NOT NULL,
    phase TEXT NOT NULL,
    period TSTZRANGE NOT NULL,
    quantity NUMERIC NOT NULL,
    usd NUMERIC,
    list_usd NUMERIC,
    price_source TEXT NOT NULL,
    confidence TEXT NOT NULL,
    why TEXT DEFAULT '' NOT NULL,
    commitment_id BIGINT,
    gpus INTEGER DEFAULT 0 NOT NULL,
    frozen BOOLEAN NOT NULL,
    seconds NUMERIC GENERATED ALWAYS AS (case when upper_inf(period) then null else extract(epoch from upper(period) - lower(period)) end) STORED,
    dollar_seconds NUMERIC GENERATED ALWAYS AS (case when upper_inf(period) then null else quantity * usd * extract(epoch from upper(period) - lower(period)) end) STORED,
    CONSTRAINT billing_segment_pkey PRIMARY KEY (id),
    CONSTRAINT billing_segment_once_excl EXCLUDE USING gist (run_id WITH =, meter WITH =, period WITH &&),
    CONSTRAINT billing_segment_period_check CHECK (not isempty(period) and not lower_inf(period)),
    CONSTRAINT billing_segment_usd_check CHECK (usd >= 0 and list_usd >= 0 and quantity >= 0),
    CONSTRAINT billing_segment_unpriced_check CHECK ((usd is null) = (confidence = 'unpriced')),
    CONSTRAINT billing_segment_frozen_check CHECK (not (frozen and upper_inf(period))),
    CONSTRAINT billing_segment_phase_check CHECK (phase in ('booting', 'running', 'stopped', 'ending')),
    CONSTRAINT billing_segment_price_source_check CHECK (price_source in ('quoted', 'catalog', 'override', 'commitment', 'none')),
    CONSTRAINT billing_segment_confidence_check CHECK (confidence in ('firm', 'estimated', 'guessed', 'unpriced')),
    CONSTRAINT billing_segment_run_id_fkey FOREIGN KEY(run_id) REFERENCES run (id) ON DELETE RESTRICT,
    CONSTRAINT billing_segment_label_set_id_fkey FOREIGN KEY(label_set_id) REFERENCES label_set (id),
    CONSTRAINT billing_segment_commitment_id_fkey FOREIGN KEY(commitment_id) REFERENCES commitment (id)
)
    """,
    """
CREATE INDEX billing_segment_begins_idx ON billing_segment (lower(period))
    """,
    """
CREATE INDEX billing_segment_open_idx ON billing_segment (run_id) WHERE upper_inf(period)
    """,
    """
CREATE INDEX billing_segment_period_idx ON billing_segment USING gist (period)
    """,
    """
CREATE INDEX billing_segment_unpriced_idx ON billing_segment (run_id) WHERE usd is null
    """,
    """
COMMENT ON TABLE billing_segment IS 'Every second of every meter, once. Derived from run. Written by ledger/.'
    """,
    """
COMMENT ON COLUMN billing_segment.meter IS 'kind, or kind:label'
    """,
    """
COMMENT ON COLUMN billing_segment.phase IS 'booting, running, stopped (workload over) or ending'
    """,
    """
COMMENT ON COLUMN billing_segment.period IS 'unbounded above while it runs'
    """,
    """
COMMENT ON COLUMN billing_segment.quantity IS 'units'
    """,
    """
COMMENT ON COLUMN billing_segment.usd IS 'dollars a unit-hour; null: unpriced, not free'
    """,
    """
COMMENT ON COLUMN billing_segment.list_usd IS 'the same on demand, as listed'
    """,
    """
COMMENT ON COLUMN billing_segment.confidence IS 'firm, estimated, guessed or unpriced'
    """,
    """
COMMENT ON COLUMN billing_segment.why IS 'why there is no price'
    """,
    """
COMMENT ON COLUMN billing_segment.commitment_id IS 'it is covered by: billed nothing here'
    """,
    """
COMMENT ON COLUMN billing_segment.gpus IS 'of the machine; 0 on all its meters but one'
    """,
    """
COMMENT ON COLUMN billing_segment.frozen IS 'its run is closed: never changed any more'
    """,
    """
COMMENT ON COLUMN billing_segment.seconds IS 'exact; null while it runs'
    """,
    """
COMMENT ON COLUMN billing_segment.dollar_seconds IS 'null while it runs, and without a price'
    """,
)
_COLUMNS = (
    """alter table claim add column workload_kind text not null default ''""",
    """alter table claim add column workload_name text not null default ''""",
    """alter table claim add column labels jsonb not null default '{}'::jsonb""",
    """alter table run add column repriced jsonb not null default '[]'::jsonb""",
    """alter table run add column stops jsonb not null default '[]'::jsonb""",
    """alter table run add column changed_at timestamptz not null default now()""",
    """create index run_changed_at_idx on run (changed_at)""",
    """COMMENT ON COLUMN claim.workload_kind IS 'of what controlled the Pod at placement, Pod for a bare one'""",
    """COMMENT ON COLUMN claim.labels IS 'the Pod''s labels at placement, without ours'""",
    """COMMENT ON COLUMN run.repriced IS 'other meters than quoted, as the cloud showed them: at (ours), meters; oldest first'""",
    """COMMENT ON COLUMN run.stops IS 'ends of its workload that a restart undid: ended, again; oldest first'""",
    """COMMENT ON COLUMN run.changed_at IS 'when any column changed last; a trigger sets it'""",
)
_GUARDS = (
    """create function ledger_is_frozen() returns trigger language plpgsql as $$
begin
    raise exception 'a closed segment is frozen: write an adjustment' using errcode = '23514';
end $$
""",
    """create function ledger_is_append_only() returns trigger language plpgsql as $$
begin
    raise exception '% rows are never changed: write another one', tg_table_name using errcode = '23514';
end $$
""",
    """create function run_has_changed() returns trigger language plpgsql as $$
begin
    new.changed_at := clock_timestamp();
    return new;
end $$
""",
    """create trigger billing_segment_frozen before update or delete on billing_segment
for each row when (old.frozen) execute function ledger_is_frozen()
""",
    """create trigger billing_adjustment_append_only before update or delete on billing_adjustment
for each row execute function ledger_is_append_only()
""",
    """create trigger billing_period_close_append_only before update or delete on billing_period_close
for each row execute function ledger_is_append_only()
""",
    """create trigger run_changed before update on run
for each row when (old is distinct from new) execute function run_has_changed()
""",
)

_DROP_REPORTS = """
do $$ declare each text; begin
    for each in select format('drop view if exists %I cascade', relname) from pg_class
            where relkind = 'v' and relnamespace = current_schema()::regnamespace
        union all select 'drop function if exists ' || p.oid::regprocedure || ' cascade' from pg_proc p
            where p.pronamespace = current_schema()::regnamespace
                and (p.proname = 'store_views_version' or obj_description(p.oid, 'pg_proc') like 'Report: %')
    loop execute each; end loop;
end $$
"""


def upgrade() -> None:
    op.execute("create extension if not exists btree_gist")
    for statement in (*_COLUMNS, *_TABLES, *_GUARDS):
        op.execute(text(statement.replace(":", r"\:")))


def downgrade() -> None:
    op.execute(_DROP_REPORTS)
    for name in (
        "billing_segment",
        "billing_adjustment",
        "ledger_run",
        "cost_daily",
        "commitment",
        "budget_told",
        "billing_period_close",
        "provider_bill_line",
        "price_point",
        "price_override",
        "label_set",
        "cost_day",
        "budget",
        "billing_rule",
    ):
        op.execute(f"drop table {name} cascade")
    op.execute("drop trigger run_changed on run")
    for function in ("ledger_is_frozen", "ledger_is_append_only", "run_has_changed"):
        op.execute(f"drop function {function}()")
    for column in ("repriced", "stops", "changed_at"):
        op.execute(f"alter table run drop column {column}")
    for column in ("workload_kind", "workload_name", "labels"):
        op.execute(f"alter table claim drop column {column}")
