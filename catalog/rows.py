"""One catalogue file's text, row by row: what each says, or what is wrong with it, by line and column. Pure.

Money is exact, and never zero: a price that nobody knows is written ``?`` and stays unknown.
"""

import csv
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import Final, NamedTuple, TypeVar

from providers.base import Accelerator, Meter, MeterKind, Tier

ANY_COUNT: Final = 0
"""An offering whose accelerator has this count is for every count; its GPU meter is for one."""

UNKNOWN: Final = "?"
_GIB = 2**30
_COUNT_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # the value of a Pod's label
_SHAPE = re.compile(r"(?=.{1,253}\Z)\S(.*\S)?")  # some clouds have blanks in their ids
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_METERS: Final = {
    "machine_usd": MeterKind.MACHINE,
    "gpu_usd": MeterKind.GPU,
    "cpu_usd": MeterKind.CPU,
    "memory_usd": MeterKind.MEMORY,
    "disk_usd": MeterKind.DISK,
}
_PLAIN_PRICE = "price_per_hour"
PRICES: Final = (*_METERS, _PLAIN_PRICE)
REQUIRED: Final = ("accelerator_type", "capacity_type")
COLUMNS: Final = (
    *REQUIRED,
    "accelerator_id",
    "aliases",
    "gpu_count",
    "region",
    "cpu",
    "memory_gib",
    "disk_gib",
    *PRICES,
    "available",
    "updated",
    "source",
)
T = TypeVar("T")


class Problem(NamedTuple):
    """What is wrong where. ``line`` counts from 1."""

    line: int
    column: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line, for one count of accelerators. ``regions`` are the words as written; none: everywhere."""

    line: int
    accelerator: Accelerator | None
    shape: str
    tier: Tier
    meters: tuple[Meter, ...]
    aliases: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    cpu: Decimal | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    available: bool = True
    updated: date | None = None
    source: str = ""


def parse(text: str) -> tuple[list[Row], list[Problem]]:
    """Every row that can be read, and every problem, in the order of the lines."""
    lines = csv.reader(_without_comments(text), strict=True, skipinitialspace=True)
    rows: list[Row] = []
    problems: list[Problem] = []
    header: list[str] | None = None
    while True:
        try:
            cells = next(lines, None)
        except csv.Error as error:
            problems.append(Problem(lines.line_num, "row", f"cannot be read: {error}"))
            break  # an open quote swallows what follows: nothing after it can be trusted
        if cells is None:
            break
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            problems += _header_problems(header, lines.line_num)
            if problems:
                break
        elif len(cells) != len(header):
            text = f"has {len(cells)} fields where the header has {len(header)}"
            problems.append(Problem(lines.line_num, "row", text))
        else:
            values = dict(zip(header, (cell.strip() for cell in cells), strict=True))
            line = _Line(lines.line_num, values)
            rows += line.rows()
            problems += line.problems
    if header is None and not problems:
        problems.append(
            Problem(1, "header", f"is missing; the first line names the columns: {_list(COLUMNS)}")
        )
    return rows, problems


def _without_comments(text: str) -> Iterator[str]:
    """The lines, a comment's as an empty one, so that numbers stay right."""
    for line in text.splitlines(keepends=True):
        yield "\n" if line.lstrip().startswith("#") else line


def _header_problems(header: list[str], line: int) -> Iterator[Problem]:
    for name in dict.fromkeys(header):
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {_list(COLUMNS)}"
            yield Problem(line, name or "header", f"no such column{hint}")
        elif header.count(name) > 1:
            yield Problem(line, name, "is there twice")
    for name in REQUIRED:
        if name not in header:
            yield Problem(line, name, "this column is required")
    if not set(PRICES) & set(header):
        yield Problem(line, "header", f"no price: at least one of {_list(PRICES)} is required")


@dataclass(slots=True)
class _Line:
    number: int
    values: dict[str, str]
    problems: list[Problem] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """One row for each count; none when anything is wrong."""
        kind = self._read("accelerator_type", _name, None)
        tier = self._read("capacity_type", _tier, None)
        counts: tuple[int, ...] = self._read("gpu_count", _counts, (ANY_COUNT,))
        shape = self._read("accelerator_id", _shape, kind)
        aliases: tuple[str, ...] = self._read("aliases", _names, ())
        cpu = self._read("cpu", _amount, None)
        memory_gib = self._read("memory_gib", _amount, None)
        disk_gib = self._read("disk_gib", _amount, None)
        available = self._read("available", _yes_or_no, True)
        updated = self._read("updated", _date, None)
        prices = {column: self._read(column, _price, None) for column in PRICES}
        given = [column for column in PRICES if self.values.get(column)]
        if not self.values["capacity_type"]:
            self._wrong("capacity_type", f"is empty; it is one of {_list(Tier)}")
        if not given:
            self._wrong(
                "price", f"none is given: fill one of {_list(PRICES)}, with {UNKNOWN} if nobody knows it"
            )
        if _PLAIN_PRICE in given and len(given) > 1:
            self._wrong(
                _PLAIN_PRICE, f"is the whole price, and {given[0]} is there too: take one of them off"
            )
        if not self.values["accelerator_type"]:
            self._check_without_accelerator(shape)
        if self.problems or tier is None or shape is None:
            return []
        return [
            Row(
                line=self.number,
                accelerator=Accelerator(type=kind, count=count) if kind else None,
                shape=shape,
                tier=tier,
                meters=_meters(given, prices, count=count, cpu=cpu, memory_gib=memory_gib, disk_gib=disk_gib),
                aliases=aliases,
                regions=tuple(dict.fromkeys(self.values.get("region", "").split())),
                cpu=cpu,
                memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
                disk_bytes=None if disk_gib is None else int(disk_gib * _GIB),
                available=available,
                updated=updated,
                source=self.values.get("source", ""),
            )
            for count in counts
        ]

    def _check_without_accelerator(self, shape: str | None) -> None:
        if shape is None:
            self._wrong("accelerator_id", "is empty: a machine without accelerator needs the cloud's own id")
        for column in ("gpu_count", "gpu_usd", "aliases"):
            if self.values.get(column):
                self._wrong(column, "is given, and accelerator_type is empty")

    def _read(self, column: str, read: Callable[[str], T], default: T) -> T:
        text = self.values.get(column, "")
        if not text:
            return default
        try:
            return read(text)
        except ValueError as error:
            self._wrong(column, str(error))
            return default

    def _wrong(self, column: str, message: str) -> None:
        self.problems.append(Problem(self.number, column, message))


def _meters(
    given: list[str],
    prices: dict[str, Decimal | None],
    *,
    count: int,
    cpu: Decimal | None,
    memory_gib: Decimal | None,
    disk_gib: Decimal | None,
) -> tuple[Meter, ...]:
    """What is not fixed by the shape has quantity 0 here: the adapter's quote puts the request's in."""
    quantities = {
        MeterKind.MACHINE: Decimal(1),
        MeterKind.GPU: Decimal(count or 1),
        MeterKind.CPU: cpu or Decimal(0),
        MeterKind.MEMORY: memory_gib or Decimal(0),
        MeterKind.DISK: disk_gib or Decimal(0),
    }
    plain = MeterKind.GPU if count == ANY_COUNT else MeterKind.MACHINE
    kinds = {column: _METERS.get(column, plain) for column in given}
    return tuple(
        Meter(kind=kind, quantity=quantities[kind], usd=prices[column]) for column, kind in kinds.items()
    )


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} cannot be the value of a Pod's label: letters, digits and -_. between them, at most 63"
        )
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(word) for word in text.split())


def _shape(text: str) -> str:
    if not _SHAPE.fullmatch(text):
        raise ValueError(f"{text!r} is not an id of a cloud: at most 253 characters")
    return text


def _tier(text: str) -> Tier:
    try:
        return Tier(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {_list(Tier)}") from None


def _counts(text: str) -> tuple[int, ...]:
    """``8``, ``1 2 4``, ``1-8``; 0 alone is every count."""
    if text == "0":
        return (ANY_COUNT,)
    counts: list[int] = []
    for word in text.split():
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", word)
        if match is None:
            raise ValueError(f"{word!r} is not a count: write 8, or 1-8, or 1 2 4; nothing for any count")
        first = int(match[1])
        last = int(match[2] or match[1])
        if not 1 <= first <= last <= _COUNT_MAX:
            raise ValueError(f"{word!r} must be between 1 and {_COUNT_MAX}, the smaller number first")
        counts += range(first, last + 1)
    return tuple(dict.fromkeys(counts))


def _price(text: str) -> Decimal | None:
    if text == UNKNOWN:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not dollars an hour, such as 2.50; {UNKNOWN} if nobody knows it")
    if not (usd := Decimal(text)):
        raise ValueError(f"nothing costs 0 dollars; write {UNKNOWN} if nobody knows the price")
    return usd


def _amount(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text) or not (amount := Decimal(text)):
        raise ValueError(f"{text!r} is not an amount above 0, such as 16 or 7.5")
    return amount


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a date, such as 2026-08-31") from None


def _yes_or_no(text: str) -> bool:
    answers = {"true": True, "false": False}
    if text.lower() not in answers:
        raise ValueError(f"{text!r} is not true or false")
    return answers[text.lower()]


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)
