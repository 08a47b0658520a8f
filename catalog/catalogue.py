"""What is written down of each cloud: one CSV file of shapes and prices per adapter, checked whole at start.

The rows serve clouds that no call asks for offers, and are known before any cloud has answered. A file that
cannot be read to its last row is no catalogue: a dropped row would be a price or a shape that nobody misses,
so every error of every file is listed and nothing starts. ``docs/catalogue.md`` is the format for people.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from catalog.regions import RegionWords, words_of
from catalog.rows import Problem, Row, parse
from providers.base import Offering

SHIPPED: Final = "catalog/data"
_WHOLE, _GROUP, _LITERAL = range(3)  # how exactly a row names a region: the more exact one is believed


class BadCatalogue(ValueError):
    """Catalogue files that cannot be used; ``errors`` has one line each: ``file:line: column: message``."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRows:
    """One file. ``aliases`` leads from other names of an accelerator, in lower case, to its own, as written.

    ``rows`` are offerings of no account yet, one for each region; rows that say "not available" are left out.
    """

    adapter: str
    rows: tuple[Offering, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    accelerators: frozenset[str] = frozenset()

    def offerings(self, *, provider: str, account: str) -> tuple[Offering, ...]:
        """The rows as one account's offerings, in the order of the file: the first match is the primary."""
        return tuple(replace(row, provider=provider, account=account) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Every file, by adapter. Empty: nothing is written down."""

    clouds: Mapping[str, CloudRows] = field(default_factory=dict)

    def of(self, adapter: str) -> CloudRows:
        """What is written of the clouds that this adapter speaks to; nothing when there is no file."""
        return self.clouds.get(adapter) or CloudRows(adapter=adapter)


def load(directory: str | Path | None = None, *, adapters: Iterable[str] = ()) -> Catalogue:
    """The catalogue that comes with Nebula; a file of ``directory`` takes the place of the one of its name.

    ``adapters`` are the installed ones: a file of ``directory`` that is for none of them, nor in the place of
    one of ours, is an error, since it would never be read.

    Raises:
        BadCatalogue: with every error of every file.
    """
    found = {_adapter(entry.name): (f"{SHIPPED}/{entry.name}", entry) for entry in _shipped()}
    errors: list[str] = []
    if directory is not None:
        known = {*adapters, *found}
        try:
            own = sorted(path for path in Path(directory).iterdir() if path.name.endswith(".csv"))
        except OSError as error:
            raise BadCatalogue([f"{directory}: cannot be listed: {error.strerror}"]) from error
        for path in own:
            adapter = path.name.removesuffix(".csv")
            if adapter not in known:
                names = ", ".join(sorted(known))
                errors.append(f"{path}:1: file name: no adapter {adapter!r} is installed (known: {names})")
            found[adapter] = (str(path), path)
    clouds = {}
    for adapter, (name, file) in found.items():
        cloud, problems = _read(adapter, file)
        clouds[adapter] = cloud
        errors += [f"{name}:{problem.line}: {problem.column}: {problem.message}" for problem in problems]
    if errors:
        raise BadCatalogue(errors)
    return Catalogue(clouds=clouds)


def text_of(adapter: str, directory: str | Path | None = None) -> str:
    """The text of an adapter's file, of ``directory`` if it has one, else ours; "" where there is none."""
    name = f"{adapter}.csv"
    if directory is not None and (own := Path(directory) / name).is_file():
        return own.read_text(encoding="utf-8-sig")
    return next((each.read_text(encoding="utf-8") for each in _shipped() if each.name == name), "")


def _shipped() -> list[Traversable]:
    folder = files("catalog").joinpath("data")
    return sorted(
        (each for each in folder.iterdir() if each.name.endswith(".csv")), key=lambda each: each.name
    )


def _adapter(file_name: str) -> str:
    return file_name.removesuffix(".csv")


def _read(adapter: str, file: Traversable) -> tuple[CloudRows, list[Problem]]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        return CloudRows(adapter=adapter), [Problem(1, "file", f"cannot be read: {error.strerror}")]
    except UnicodeDecodeError as error:
        return CloudRows(adapter=adapter), [Problem(1, "file", f"is not UTF-8 (byte {error.start})")]
    rows, problems = parse(text)
    aliases, clashes = _aliases(rows)
    offerings, doubles = _by_region(rows, adapter=adapter, words=words_of(adapter))
    problems = sorted([*problems, *clashes, *doubles])
    types = frozenset(row.accelerator.type for row in rows if row.accelerator is not None)
    cloud = CloudRows(adapter=adapter, rows=offerings, aliases=aliases, accelerators=types)
    return cloud, problems


def _aliases(rows: list[Row]) -> tuple[dict[str, str], list[Problem]]:
    """Every other name, and those that would mean two accelerators."""
    own = {row.accelerator.type.lower(): row.accelerator.type for row in rows if row.accelerator}
    aliases: dict[str, str] = {}
    problems = []
    for row in rows:
        for alias in row.aliases if row.accelerator else ():
            meant = row.accelerator.type if row.accelerator else ""
            before = own.get(alias.lower()) or aliases.setdefault(alias.lower(), meant)
            if before.lower() != meant.lower():
                problems.append(Problem(row.line, "aliases", f"{alias!r} already means {before}"))
    return aliases, sorted(set(problems))


@dataclass(slots=True)
class _Placed:
    row: Row
    exactness: int


def _by_region(
    rows: list[Row], *, adapter: str, words: RegionWords
) -> tuple[tuple[Offering, ...], list[Problem]]:
    """One offering for each row and region. Of two rows for one thing the more exact region is believed."""
    chosen: dict[tuple[str, str, str, str], _Placed] = {}
    problems = []
    for row in rows:
        for region, exactness in _regions(row, words):
            accelerator = row.accelerator.key if row.accelerator else ""
            key = (accelerator, row.shape, row.tier.value, region)
            before = chosen.get(key)
            if before is not None and before.exactness == exactness:
                where = f" in {region}" if region else ""
                text = f"says the same as line {before.row.line}: {row.shape} {row.tier}{where}"
                problems.append(Problem(row.line, "row", text))
            elif before is None or before.exactness < exactness:
                chosen[key] = _Placed(row, exactness)
    offerings = tuple(
        Offering(
            provider=adapter,
            account="",
            region=region,
            tier=placed.row.tier,
            accelerator=placed.row.accelerator,
            shape=placed.row.shape,
            meters=placed.row.meters,
            cpu=placed.row.cpu,
            memory_bytes=placed.row.memory_bytes,
            disk_bytes=placed.row.disk_bytes,
            priced_at=_midnight(placed.row.updated),
        )
        for (_, _, _, region), placed in sorted(chosen.items(), key=lambda each: each[1].row.line)
        if placed.row.available
    )
    return offerings, problems


def _midnight(day: date | None) -> datetime | None:
    return None if day is None else datetime(day.year, day.month, day.day, tzinfo=UTC)


def _regions(row: Row, words: RegionWords) -> list[tuple[str, int]]:
    """Where a row holds. Without a word: everywhere, which is also each region of the cloud's groups."""
    if not row.regions:
        return [(region, _WHOLE) for region in (*words.grouped, "")]
    found: dict[str, int] = {}
    for word in row.regions:
        group = words.groups.get(word.lower())
        for region in group or (word,):
            found[region] = max(found.get(region, 0), _GROUP if group else _LITERAL)
    return list(found.items())
