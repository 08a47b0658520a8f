"""What the tables of money let nobody do, whoever writes: triggers, made with the tables.

A migration makes the same; the drift check compares them.
"""

from sqlalchemy import Connection, event

from app.store.tables import Base

# Frozen means frozen. A frozen row may leave only once the archive has every second of it.
FROZEN = """
create function ledger_is_frozen() returns trigger language plpgsql as $$
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
# Nothing is put into a month that is closed, whoever writes.
OPEN_MONTH = """
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
APPEND_ONLY = """
create function ledger_is_append_only() returns trigger language plpgsql as $$
begin
    raise exception '% rows are never changed: write another one', tg_table_name using errcode = '23514';
end $$
"""
FROZEN_TRIGGER = """
create trigger billing_segment_frozen before update or delete on billing_segment
for each row when (old.frozen) execute function ledger_is_frozen()
"""
APPEND_ONLY_TRIGGERS = tuple(
    f"""
create trigger {name}_append_only before update or delete on {name}
for each row execute function ledger_is_append_only()
"""
    for name in ("billing_adjustment", "billing_period_close", "billing_segment_archive")
)
OPEN_MONTH_TRIGGERS = tuple(
    f"""
create trigger {name}_open_month before insert on {name}
for each row execute function ledger_month_is_open()
"""
    for name in ("billing_segment", "billing_adjustment")
)

RUN_CHANGED = """
create function run_has_changed() returns trigger language plpgsql as $$
begin
    new.changed_at := clock_timestamp();
    return new;
end $$
"""
RUN_CHANGED_TRIGGER = """
create trigger run_changed before update on run
for each row when (old is distinct from new) execute function run_has_changed()
"""

_GUARDS = (
    FROZEN,
    APPEND_ONLY,
    OPEN_MONTH,
    RUN_CHANGED,
    FROZEN_TRIGGER,
    *APPEND_ONLY_TRIGGERS,
    *OPEN_MONTH_TRIGGERS,
    RUN_CHANGED_TRIGGER,
)


@event.listens_for(Base.metadata, "before_create")
def _extension(_target: object, connection: Connection, **_: object) -> None:
    connection.exec_driver_sql("create extension if not exists btree_gist")


@event.listens_for(Base.metadata, "after_create")
def _guards(_target: object, connection: Connection, **_: object) -> None:
    for statement in _GUARDS:
        connection.exec_driver_sql(statement)
