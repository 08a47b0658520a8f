"""How far our clock is off, by the API server's own words."""

from datetime import UTC, datetime, timedelta

import pytest

from app.kube.servertime import EVERY_S, ServerTime

NOON = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


class Own:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.mark.parametrize(
    ("header", "off_s"),
    [
        ("Sun, 01 Mar 2026 12:00:00 GMT", 0.0),
        ("Sun, 01 Mar 2026 12:00:01 GMT", 0.0),
        ("Sun, 01 Mar 2026 12:10:00 GMT", 600.5),
        ("Sun, 01 Mar 2026 11:50:00 GMT", -599.5),
        ("yesterday", 0.0),
        (None, 0.0),
    ],
)
def test_a_difference_that_matters_is_heeded_and_nothing_else(header: str | None, off_s: float):
    time = ServerTime(own=Own())

    time.hear(header)

    assert time.now() == NOON + timedelta(seconds=off_s)


def test_a_clock_that_is_put_right_counts_again_and_one_that_is_set_back_is_noticed_at_once():
    own = Own()
    time = ServerTime(own=own)
    time.hear("Sun, 01 Mar 2026 12:10:00 GMT")
    own.now += timedelta(seconds=600)
    time.hear("Sun, 01 Mar 2026 12:10:00 GMT")
    assert time.now() == own.now

    own.now -= timedelta(seconds=900)
    time.hear("Sun, 01 Mar 2026 12:10:01 GMT")
    assert time.now() - own.now > timedelta(seconds=890)


def test_not_every_answer_is_looked_at():
    own = Own()
    time = ServerTime(own=own)
    time.hear("Sun, 01 Mar 2026 12:00:00 GMT")
    own.now += timedelta(seconds=1)
    time.hear("Sun, 01 Mar 2026 13:00:00 GMT")
    assert time.now() == own.now

    own.now += timedelta(seconds=EVERY_S)
    time.hear("Sun, 01 Mar 2026 13:00:00 GMT")
    assert time.now() > own.now
