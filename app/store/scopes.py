"""The names that a scope of money can have: configured, listed, claimed, reserved or ever billed."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_NAMES: Mapping[str, str] = {
    "provider": "select provider from billing_rule union select provider from label_set",
    "account": """
        select account from billing_rule where provider = :provider
        union select account from label_set where provider = :provider
    """,
    "sku": """
        select sku from price_point where provider = :provider
        union select sku from label_set where provider = :provider
        union select accelerator || ':' || accelerator_count from label_set
            where provider = :provider and accelerator <> ''
        -- However a Pod wrote it; a machine that is in the ledger is known by the ledger's name.
        union select a.accelerator from provision_attempt a where a.provider = :provider
            and not exists (select from run r join ledger_run l on l.run_id = r.id
                where r.claim_uid = a.claim_uid and r.attempt = a.number)
    """,
    "namespace": """
        select namespace from label_set union select namespace from reservation
        union select pod_namespace from claim union select pod_namespace from rental
    """,
    "label": """
        select e.key || '=' || e.value from label_set l, jsonb_each_text(l.tags) e
        union select e.key || '=' || e.value from reservation r, jsonb_each_text(r.labels) e
    """,
    "team": "select team from label_set union select team from reservation",
    "pool": """
        select pool from label_set union select pool from reservation union select pool from claim
        union select pool from budget where pool is not null
    """,
}


class UnknownName(ValueError):
    """A scope names what nobody knows; its words name the field, the nearest names, and the way out."""


async def expect_known(conn: AsyncConnection, names: Mapping[str, str | None], *, provider: str = "") -> None:
    """Every name of a scope is known; None and ``*`` are for any, and need not be.

    Raises:
        UnknownName: the first that is not.
    """
    for what, name in names.items():
        if name is None or name == "*":
            continue
        values = {"provider": provider} if ":provider" in _NAMES[what] else {}
        known = sorted(filter(None, (await conn.execute(text(_NAMES[what]), values)).scalars()))
        same = name.lower() in {each.lower() for each in known} if what == "sku" else name in known
        if not same:
            raise UnknownName(_said(what, name, known))


def _said(what: str, name: str, known: Sequence[str]) -> str:
    folded = {each.lower(): each for each in known}
    near = [folded[each] for each in get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    words = {"pool": "NodePool", "sku": "shape"}.get(what, what)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        hint = f"there are: {', '.join(known[:10])}" + (", …" if len(known) > 10 else "")
    else:
        hint = "none is known yet"
    return f"--{what}: nothing was ever seen of a {words} {name!r}; {hint} (--new takes it all the same)"
