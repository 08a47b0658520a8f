"""Amounts as people write them in manifests: Kubernetes quantities, durations, dollars.

All parsing is exact (`Decimal`, `int`), never by float, and every text that is no amount raises `ValueError`.
The three grammars are read here and nowhere else.
"""

import re
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SUFFIXES: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i)?)"
)
_QUANTITY_MAX = 2**63 - 1
_DIGITS = 80  # of precision: more than any text of `_TEXT_MAX` characters times 2**60 needs
_TEXT_MAX = 50

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_DURATION = re.compile(DURATION_PATTERN)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_UNIT_US: Final = {"ms": 10**3, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6}
_DURATION_TEXT_MAX = 32
_DURATION_MAX = timedelta(days=106_751)  # what 64 bits of nanoseconds hold, as in the API server's own parser

MONEY_PATTERN: Final = r"^(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?$"
_MONEY = re.compile(MONEY_PATTERN)
_MONEY_TEXT_MAX = 19


def parse_quantity(text: str | int) -> Decimal:
    """The exact value of a Kubernetes quantity: ``500m`` is 0.5, ``1Ki`` is 1024, ``1e3`` is 1000.

    Raises:
        ValueError: it is no quantity, or larger than a Kubernetes quantity can be (2^63 - 1).
    """
    match = _QUANTITY.fullmatch(str(text)) if len(str(text)) <= _TEXT_MAX else None
    if isinstance(text, bool) or match is None or not str(text).isascii():
        raise ValueError(f"{text!r} is no quantity; write for example 2, 500m or 16Gi")
    number, exponent, suffix = match.groups()
    with localcontext(prec=_DIGITS):
        value = Decimal(number)
        value = value.scaleb(int(exponent)) if exponent else value * _SUFFIXES[suffix or ""]
    if abs(value) > _QUANTITY_MAX:
        raise ValueError(f"quantity {text!r} is too large")
    return value


def parse_count(text: str | int) -> int:
    """A quantity that must be a whole number and not negative, such as a GPU count.

    Raises:
        ValueError: it is no quantity, or not whole, or below zero.
    """
    value = parse_quantity(text)
    if value < 0 or value != value.to_integral_value():
        raise ValueError(f"{text!r} is no whole number of at least 0")
    return int(value)


def parse_bytes(text: str | int) -> int:
    """A size in bytes, rounded up to a whole byte as Kubernetes does.

    Raises:
        ValueError: it is no quantity, or below zero.
    """
    value = parse_quantity(text)
    if value < 0:
        raise ValueError(f"{text!r} is below zero")
    return int(value.to_integral_value(rounding=ROUND_CEILING))


def parse_duration(text: str) -> timedelta:
    """A positive duration: ``500ms``, ``1.5s``, ``10m``, ``1h30m``. Rounded up to a whole microsecond.

    Raises:
        ValueError: it is no duration, or zero, or longer than 292 years.
    """
    if len(text) > _DURATION_TEXT_MAX or not text.isascii() or not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no duration; write for example 30s, 10m or 1h30m")
    parts = (Decimal(number) * _UNIT_US[unit] for number, unit in _DURATION_PART.findall(text))
    microseconds = int(sum(parts, Decimal(0)).to_integral_value(rounding=ROUND_CEILING))
    if microseconds == 0:
        raise ValueError(f"duration {text!r} must be longer than zero")
    if microseconds > _DURATION_MAX // timedelta(microseconds=1):
        raise ValueError(f"duration {text!r} is too long")
    return timedelta(microseconds=microseconds)


def format_duration(duration: timedelta) -> str:
    """The shortest exact text that `parse_duration` reads back, to the microsecond: ``1h30m``, ``0.5s``.

    Raises:
        ValueError: it is not longer than zero.
    """
    microseconds = duration // timedelta(microseconds=1)
    if microseconds <= 0:
        raise ValueError(f"duration {duration} must be longer than zero")
    hours, rest = divmod(microseconds, _UNIT_US["h"])
    minutes, rest = divmod(rest, _UNIT_US["m"])
    seconds = f"{Decimal(rest).scaleb(-6):f}".rstrip("0").rstrip(".") if rest else ""
    return "".join(f"{part}{unit}" for part, unit in ((hours, "h"), (minutes, "m"), (seconds, "s")) if part)


def parse_money(text: str) -> Decimal:
    """Exact dollars, not negative: ``2``, ``0.79``, ``12.345678901``. Whole numbers carry no leading zeros.

    Raises:
        ValueError: anything else, also a sign, an exponent, a thousands separator or a currency.
    """
    if not text.isascii() or not _MONEY.fullmatch(text):
        raise ValueError(f"{text!r} is no amount of dollars; write for example 2.50")
    return Decimal(text)


def parse_price(text: str) -> Decimal:
    """Exact dollars above zero: a limit of nothing would be a way to write "never" by accident.

    Raises:
        ValueError: it is no amount, or zero.
    """
    value = parse_money(text)
    if value == 0:
        raise ValueError(f"{text!r} must be more than 0 dollars")
    return value


def format_money(value: Decimal) -> str:
    """The plain decimal text of an amount, as the API server stores it: exact, with cents at least.

    Raises:
        ValueError: it cannot be written without rounding (below zero, 10^9 and more, past nine decimals).
    """
    text = _with_cents(value)
    parse_money(text)
    return text


def usd(amount: Decimal) -> str:
    """Dollars as people read them, exact: ``$18.96``, ``$2.00``, ``$0.125``."""
    return f"${_with_cents(amount)}"


def _with_cents(value: Decimal) -> str:
    whole, _, parts = f"{value:f}".partition(".")
    return f"{whole}.{parts.rstrip('0'):0<2}"


def _text_only(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string: a number would have passed through a float")
    return value


def _as_duration(value: Any) -> timedelta:
    return value if isinstance(value, timedelta) else parse_duration(_text_only(value))


def _as_money(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else parse_money(_text_only(value))


def _as_price(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else parse_price(_text_only(value))


Duration = Annotated[
    timedelta,
    BeforeValidator(_as_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": _DURATION_TEXT_MAX,
            "x-kubernetes-validations": [
                {
                    "rule": f"self.matches(r'{DURATION_PATTERN}') && duration(self) > duration('0s')",
                    "message": "must be a positive duration such as 30s, 10m or 1h30m",
                }
            ],
        }
    ),
]
"""A positive length of time, a string in manifests."""

Money = Annotated[
    Decimal,
    BeforeValidator(_as_money),
    PlainSerializer(format_money, return_type=str),
    WithJsonSchema({"type": "string", "maxLength": _MONEY_TEXT_MAX, "pattern": MONEY_PATTERN}),
]
"""Dollars, not negative, a string in manifests."""

Price = Annotated[
    Decimal,
    BeforeValidator(_as_price),
    PlainSerializer(format_money, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": _MONEY_TEXT_MAX,
            "pattern": MONEY_PATTERN,
            "x-kubernetes-validations": [
                {"rule": "self.matches('[1-9]')", "message": "must be more than 0 dollars"}
            ],
        }
    ),
]
"""Dollars above zero, a string in manifests."""
