"""How commands print: tables like kubectl's, or JSON. No Postgres and no Kubernetes in here."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import click

Style = Literal["table", "json"]

GAP = "   "
NONE = "<none>"

style_option = click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print.",
)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Aligned columns, as wide as their widest cell; the titles in ``right`` are aligned to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(titles, row, widths, strict=True)
        )
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)


def to_json(value: Any) -> str:
    """Indented JSON. Money is a text, so that no reader makes a float of it; times are ISO 8601 with Z."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z
    return orjson.dumps(value, default=_plain, option=options).decode()


def age(seconds: float) -> str:
    """A length of time as kubectl prints it: 45s, 9m40s, 3h5m, 2d4h, 400d. Below zero reads as 0s."""
    total = max(0, int(seconds))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if total < 120:
        return f"{total}s"
    if minutes < 10:
        return _pair(minutes, "m", total % 60, "s")
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return _pair(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _pair(days, "d", hours % 24, "h")
    return f"{days}d"


def since(then: datetime, *, now: datetime) -> str:
    """How long ago: for AGE columns."""
    return age((now - then).total_seconds())


def until(then: datetime, *, now: datetime) -> str:
    """``in 9m40s``, or ``3m ago`` for what is over."""
    seconds = (then - now).total_seconds()
    return f"in {age(seconds)}" if seconds > 0 else f"{age(-seconds)} ago"


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def _plain(value: Any) -> str:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be printed as JSON")
