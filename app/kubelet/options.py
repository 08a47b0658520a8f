"""What ``kubectl logs`` asks for, as a kubelet reads it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

_TRUE, _FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False", "")
_STREAMS: Final = {"": None, "All": None, "Stdout": "stdout", "Stderr": "stderr"}


class Undecodable(ValueError):
    """A parameter is not of its type: status 400."""


class Invalid(ValueError):
    """The parameters cannot be meant like that: status 422."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """``since``: lines from then on. ``limit_bytes`` counts what is sent, time stamps included."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    since: datetime | None = None
    tail_lines: int | None = None
    limit_bytes: int | None = None
    stream: str | None = None


def parse(query: Mapping[str, Sequence[str]], *, now: datetime) -> LogOptions:
    """The options of a request. Of a parameter that comes twice the first counts.

    Raises:
        Undecodable, Invalid: see there.
    """

    def text(name: str) -> str:
        return next(iter(query.get(name) or ()), "")

    def flag(name: str) -> bool:
        value = text(name)
        if value in _TRUE:
            return True
        if value in _FALSE:
            return False
        raise Undecodable(name)

    def number(name: str) -> int | None:
        value = text(name)
        if not value:
            return None
        digits = value.removeprefix("-").removeprefix("+")
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
            raise Undecodable(name)
        return int(value)

    tail = number("tailLines")
    if tail is None and text("tail") not in ("", "all"):
        tail = number("tail")
    limit, since_s = number("limitBytes"), number("sinceSeconds")
    since = _time(text("sinceTime"))
    stream = text("stream")
    if (
        (tail is not None and tail < 0)
        or (limit is not None and limit < 1)
        or (since_s is not None and since_s < 1)
        or (since_s is not None and since is not None)
        or stream not in _STREAMS
        or (_STREAMS[stream] is not None and tail is not None)
    ):
        raise Invalid
    if since_s is not None:
        try:
            since = now - timedelta(seconds=since_s)
        except OverflowError:
            since = None  # longer ago than there are dates
    return LogOptions(
        follow=flag("follow"),
        previous=flag("previous"),
        timestamps=flag("timestamps"),
        since=since,
        tail_lines=tail,
        limit_bytes=limit,
        stream=_STREAMS[stream],
    )


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise Undecodable("sinceTime") from None
    if at.tzinfo is None:
        raise Undecodable("sinceTime")
    return at.astimezone(UTC)
