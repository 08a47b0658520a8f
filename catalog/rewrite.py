"""A catalogue file made anew from what its cloud tells, the doubts about it, and the difference. Pure.

The words of people are kept: comments, aliases, and rows of shapes that the cloud does not speak of. Counts
of one shape that cost the same for each GPU share a line.
"""

import csv
import difflib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import Final

from catalog.catalogue import CloudRows
from catalog.rows import ANY_COUNT, UNKNOWN, parse
from providers.base import MeterKind, Offering

_COLUMNS: Final = ("accelerator_type", "aliases", "accelerator_id", "gpu_count", "capacity_type", "region")
_PRICES: Final = {
    MeterKind.MACHINE: "machine_usd",
    MeterKind.GPU: "gpu_usd",
    MeterKind.CPU: "cpu_usd",
    MeterKind.MEMORY: "memory_usd",
    MeterKind.DISK: "disk_usd",
}
_SIZES: Final = ("cpu", "memory_gib", "disk_gib")
_LEAPS = 10
_STEP = Decimal(1).scaleb(-9)  # as fine as a file's prices are
_GIB = 2**30

Prices = Mapping[str, Decimal | None]


@dataclass(slots=True, kw_only=True)
class _Line:
    """What becomes one line: one shape in one tier and region, at one price for each unit."""

    offering: Offering
    prices: Prices
    counts: list[int] = field(default_factory=list)


def rewritten(
    text: str, offerings: Iterable[Offering], *, before: CloudRows, today: date, source: str
) -> str:
    """The file's new text. ``text`` is the old one, and ``before`` its rows; "" and none where it is new."""
    told = list(offerings)
    spoken_of = {(row.shape, row.region, row.tier) for row in told}
    kept = [row for row in before.rows if (row.shape, row.region, row.tier) not in spoken_of]
    lines = [(line, today.isoformat(), source) for line in _lines(told)]
    written = parse(text)[0] if text else []
    said = {(row.shape, row.tier): (str(row.updated or ""), row.source) for row in written}
    aliases = {row.accelerator.type.lower(): row.aliases for row in reversed(written) if row.accelerator}
    lines += [(line, *said[(line.offering.shape, line.offering.tier)]) for line in _lines(kept)]
    used = {name for line, _, _ in lines for name in line.prices}
    priced = [name for name in _PRICES.values() if name in used]
    sizes = [name for name in _SIZES if any(_size(line.offering, name) for line, _, _ in lines)]
    out = io.StringIO()
    out.writelines(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#"))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *sizes, *priced, "updated", "source"])
    for line, updated, where in lines:
        offering = line.offering
        kind = offering.accelerator.type if offering.accelerator else ""
        writer.writerow(
            [
                kind,
                " ".join(aliases.get(kind.lower(), ())),
                offering.shape,
                _counts(line.counts),
                offering.tier.value,
                offering.region,
                *(_size(offering, name) for name in sizes),
                *(_price(line.prices, name) for name in priced),
                updated,
                where,
            ]
        )
    return out.getvalue()


def doubts(offerings: Iterable[Offering], *, before: CloudRows) -> list[str]:
    """What cannot be right: no offer at all, a price of nothing, one that leapt tenfold up or down."""
    told = list(offerings)
    if not told:
        return ["the cloud offers nothing at all"]
    old = {_key(line): line.prices for line in _lines(before.rows)}
    found = []
    for line in _lines(told):
        where = f"{line.offering.shape} {line.offering.tier}" + (
            f" in {line.offering.region}" if line.offering.region else ""
        )
        for name, usd in line.prices.items():
            earlier = old.get(_key(line), {}).get(name)
            if usd is not None and usd <= 0:
                found.append(f"{where}: {name} is {_shown(usd)}: nothing costs that")
            elif usd is None and earlier is not None and name == "gpu_usd":
                found.append(f"{where}: {name} was {_shown(earlier)}, and is not told any more")
            elif usd and earlier and not earlier / _LEAPS < usd < earlier * _LEAPS:
                found.append(f"{where}: {name} was {_shown(earlier)}, and is {_shown(usd)} now")
    return list(dict.fromkeys(found))


def difference(old: str, new: str, *, name: str) -> str:
    """The change as a diff of lines; "" when there is none."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), fromfile=name, tofile=f"{name} (new)"
    )
    return "".join(lines)


def _key(line: _Line) -> tuple[str, str, str]:
    return (line.offering.shape, line.offering.tier.value, line.offering.region)


def _lines(offerings: Iterable[Offering]) -> list[_Line]:
    lines: dict[tuple[object, ...], _Line] = {}
    for offering in offerings:
        prices = _prices(offering)
        kind = offering.accelerator.type if offering.accelerator else None
        key = (kind, offering.shape, offering.tier, offering.region, *prices.items())
        line = lines.setdefault(key, _Line(offering=offering, prices=prices))
        if offering.accelerator is not None:
            line.counts.append(offering.accelerator.count)
    return list(lines.values())


def _prices(offering: Offering) -> Prices:
    """Dollars an hour for a unit, by column. Two meters of one kind are one price."""
    found: dict[str, Decimal | None] = {}
    for meter in offering.meters:
        if (name := _PRICES.get(meter.kind)) is None:
            continue
        usd = None if meter.usd is None else meter.usd.quantize(_STEP)
        earlier = found.get(name, Decimal(0))
        found[name] = None if usd is None or earlier is None else usd + earlier
    return found


def _price(prices: Prices, name: str) -> str:
    if name not in prices:
        return ""
    usd = prices[name]
    return UNKNOWN if usd is None else _shown(usd)


def _shown(usd: Decimal) -> str:
    text = f"{usd:f}"
    whole, _, parts = text.partition(".")
    return f"{whole}.{parts.rstrip('0'):0<2}"


def _size(offering: Offering, name: str) -> str:
    if name == "cpu":
        return "" if offering.cpu is None else f"{offering.cpu.normalize():f}"
    size = offering.memory_bytes if name == "memory_gib" else offering.disk_bytes
    return "" if size is None else f"{(Decimal(size) / _GIB).quantize(Decimal('0.1')).normalize():f}"


def _counts(counts: Sequence[int]) -> str:
    """``1-8``, ``1 2 4``; nothing for any count."""
    wanted = sorted(set(counts) - {ANY_COUNT})
    spans: list[list[int]] = []
    for count in wanted:
        if spans and count == spans[-1][1] + 1:
            spans[-1][1] = count
        else:
            spans.append([count, count])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
