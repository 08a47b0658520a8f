"""Amounts are read exactly, and what is no amount is refused."""

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.quantities import (
    format_duration,
    format_money,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_money,
    parse_price,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", "8"),
        (8, "8"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5", "0.5"),
        ("5.", "5"),
        ("-2", "-2"),
        ("+2", "2"),
        ("1Ki", "1024"),
        ("1.5Gi", "1610612736"),
        ("1k", "1000"),
        ("2M", "2000000"),
        ("1E", "1000000000000000000"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("12e-3", "0.012"),
        ("100n", "0.0000001"),
        ("3u", "0.000003"),
        ("0.1234567890123456789Ei", str(1234567890123456789 * 2**60) + "e-19"),
    ],
)
def test_a_quantity_is_exact(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "1Kib", "1K", "one", "1e", "0x10", "1_000", "١", "--1", ".", "1e9999", "9" * 60, True],
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


def test_a_quantity_beyond_64_bits_is_refused():
    assert parse_quantity("9223372036854775807") == 2**63 - 1

    with pytest.raises(ValueError, match="too large"):
        parse_quantity("8Ei")


@pytest.mark.parametrize("text", ["0.5", "1500m", "-1"])
def test_half_a_gpu_or_a_negative_count_is_no_count(text):
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("0", 0), ("2000m", 2), ("1e1", 10)])
def test_a_whole_quantity_is_a_count(text, count):
    assert parse_count(text) == count


def test_sizes_round_up_to_whole_bytes():
    assert parse_bytes("1Gi") == 2**30
    assert parse_bytes("1500m") == 2


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="below zero"):
        parse_bytes("-1Gi")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("10m", timedelta(minutes=10)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5s", timedelta(seconds=1.5)),
        ("500ms", timedelta(milliseconds=500)),
        ("1h1m1s1ms", timedelta(hours=1, minutes=1, seconds=1, milliseconds=1)),
        ("0h30s", timedelta(seconds=30)),
        ("0.0001ms", timedelta(microseconds=1)),
    ],
)
def test_a_duration_is_exact_and_never_rounds_to_nothing(text, duration):
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "0s",
        "0h0m",
        "-5s",
        "5 s",
        "1d",
        "s",
        "1.s",
        ".5s",
        "5S",
        "5s\n",
        "٥s",
        "1us",
        "9" * 31 + "h",
    ],
)
def test_what_is_no_positive_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_a_duration_longer_than_the_api_server_can_count_is_refused():
    with pytest.raises(ValueError, match="too long"):
        parse_duration("2562048h")


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=100_000)))
def test_a_duration_written_is_read_back_the_same(duration):
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(minutes=15), "15m"),
        (timedelta(hours=1, minutes=30), "1h30m"),
        (timedelta(milliseconds=500), "0.5s"),
        (timedelta(hours=2), "2h"),
    ],
)
def test_a_duration_is_written_short(duration, text):
    assert format_duration(duration) == text


@pytest.mark.parametrize("text", ["2", "0.79", "0", "0.000000001", "999999999.999999999"])
def test_money_is_exact_dollars(text):
    assert str(parse_money(text)) == str(Decimal(text))
    assert parse_money(format_money(Decimal(text))) == Decimal(text)


@pytest.mark.parametrize(
    "text",
    ["", "-1", "+1", "1e3", "$2", "1,000", "02", "1.", ".5", "NaN", "Infinity", "1000000000", "1 ", "2\n"],
)
def test_what_is_no_money_is_refused(text):
    with pytest.raises(ValueError, match="dollars"):
        parse_money(text)


@pytest.mark.parametrize("text", ["0", "0.00"])
def test_a_price_of_nothing_is_refused(text):
    with pytest.raises(ValueError, match="more than 0"):
        parse_price(text)


@pytest.mark.parametrize("value", ["-1", "1e9", "0.1234567891"])
def test_money_is_never_written_rounded(value):
    with pytest.raises(ValueError, match="dollars"):
        format_money(Decimal(value))
