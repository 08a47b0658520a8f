"""What a NodePool's author is told at once. Only warnings: it may become true, or is passed on as written."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.admission.rules import Verdict
from app.api.keys import DEFAULT_ACCOUNT
from catalog.offerings import AccountOffers
from catalog.regions import region_tokens
from catalog.stock import Stock, near

Obj = Mapping[str, Any]
_SLIP = 0.85  # how alike two region words must be for one to be a slip of the other


def warn_of_pool(pool: Obj, *, stock: Stock) -> Verdict:
    """Providers, accounts and regions that nobody knows, and a pool that nothing could be placed from."""
    spec = pool.get("spec") or {}
    entries = [entry for entry in spec.get("providers") or () if isinstance(entry, Mapping)]
    warnings = [*_unknown(entries, stock), *_regions(entries, stock)]
    return Verdict(warnings=tuple(dict.fromkeys([*warnings, *_never_serves(spec, entries, stock)])))


def _key(entry: Obj) -> tuple[str, str]:
    return (str(entry.get("name") or ""), str(entry.get("account") or DEFAULT_ACCOUNT))


def _unknown(entries: list[Obj], stock: Stock) -> Iterator[str]:
    names = {name for name, _ in stock.configured}
    for name, account in sorted(map(_key, entries)):
        if name not in names:
            alike = near(name, names)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            yield (
                f'spec.providers: "{name}" is not configured in Nebula and is passed over until it is'
                f" (configured: {', '.join(sorted(names)) or 'none'}){hint}"
            )
        elif (name, account) not in stock.configured:
            accounts = sorted(account for provider, account in stock.configured if provider == name)
            yield (
                f'spec.providers: account "{account}" of "{name}" is not configured in Nebula and is passed'
                f" over until it is (configured: {', '.join(accounts)})"
            )


def _regions(entries: list[Obj], stock: Stock) -> Iterator[str]:
    for entry in entries:
        offers = stock.account(_key(entry))
        declared = [str(word) for word in entry.get("regions") or ()]
        if offers is None or not any(offers.regions):
            continue
        words = offers.words
        served = {region for region in offers.regions if region}
        groups = {group for group, regions in words.groups.items() if served & set(regions)}
        for token in region_tokens(declared, served=offers.regions, words=words):
            same_part = {word for word in served | groups if word[:2] == token[:2].lower()}
            alike = near(token.lower(), same_part, cutoff=_SLIP)
            if token in served or not token or ("" in offers.regions and not alike):
                continue  # a region that is only reached by its own name may well exist
            hint = f"; did you mean {' or '.join(alike)}?" if alike else ""
            yield (
                f'spec.providers: "{token}" is no region or group of regions that "{entry["name"]}" is known'
                f" to have; it is passed on as written{hint}"
            )


def _never_serves(spec: Obj, entries: list[Obj], stock: Stock) -> Iterator[str]:
    """Why nothing could be placed from this pool; said only when every account of it is known."""
    accounts: list[AccountOffers] = []
    for entry in entries:
        if (offers := stock.account(_key(entry))) is None:
            return
        accounts.append(offers)
    if not accounts:
        return
    wanted = [str(tier) for tier in spec.get("capacityTypes") or ()]
    sold = {tier.value for offers in accounts for tier in offers.traits.tiers}
    if wanted and not sold & set(wanted):
        yield (
            f"spec.capacityTypes: no provider of this pool sells {' or '.join(wanted)} machines, so no Pod"
            f" can be placed; they sell {', '.join(sorted(sold))}"
        )
    mode = (spec.get("egress") or {}).get("mode")
    if mode not in (None, "Open") and not any(offers.traits.enforces_egress for offers in accounts):
        yield f"spec.egress: no provider of this pool can enforce {mode}, so no Pod can be placed"
