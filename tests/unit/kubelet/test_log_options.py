"""The options of ``kubectl logs`` and what they do to lines."""

from datetime import UTC, datetime, timedelta

import pytest

from app.kubelet.lines import CUT, PIECE_BYTES, TAIL_BYTES, Filter, Line, Splitter, Tail
from app.kubelet.options import Invalid, LogOptions, Undecodable, parse
from app.machines import tail as kept
from providers.capabilities import LogChunk

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def options(**query: str) -> LogOptions:
    return parse({name: [value] for name, value in query.items()}, now=NOW)


def test_every_option_is_read():
    assert options(
        follow="true", previous="1", timestamps="true", sinceSeconds="60", tailLines="5", limitBytes="9"
    ) == LogOptions(
        follow=True,
        previous=True,
        timestamps=True,
        since=NOW - timedelta(seconds=60),
        tail_lines=5,
        limit_bytes=9,
    )
    assert options(sinceTime="2030-01-01T13:00:00+02:00").since == NOW - timedelta(hours=1)
    assert options(tail="all") == LogOptions()
    assert options(tail="3").tail_lines == 3
    assert options(stream="Stderr").stream == "stderr"


@pytest.mark.parametrize(
    "query",
    [
        {"tailLines": "-1"},
        {"limitBytes": "0"},
        {"sinceSeconds": "0"},
        {"sinceSeconds": "1", "sinceTime": "2030-01-01T00:00:00Z"},
        {"stream": "Stdin"},
        {"stream": "Stdout", "tailLines": "1"},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_invalid(query: dict[str, str]):
    with pytest.raises(Invalid):
        options(**query)


@pytest.mark.parametrize(
    "query",
    [{"tailLines": "x"}, {"follow": "maybe"}, {"sinceTime": "yesterday"}, {"sinceTime": "2030-01-01"}],
    ids=str,
)
def test_what_is_not_of_its_type_cannot_be_decoded(query: dict[str, str]):
    with pytest.raises(Undecodable):
        options(**query)


def lines(*chunks: LogChunk) -> list[Line]:
    splitter = Splitter()
    found = [line for chunk in chunks for line in splitter.feed(chunk, arrived=NOW)]
    return [*found, *splitter.rest()]


def chunk(data: bytes, stream: str | None = "stdout", *, s: int = 0) -> LogChunk:
    return LogChunk(data=data, stream=stream, at=NOW + timedelta(seconds=s))


def test_lines_of_two_streams_are_not_torn():
    found = lines(chunk(b"on"), chunk(b"err\n", "stderr"), chunk(b"e\ntwo\n"), chunk(b"end", "stderr"))

    assert [line.data for line in found] == [b"err\n", b"one\n", b"two\n", b"end"]


def test_a_line_has_the_time_of_its_first_byte():
    found = lines(chunk(b"a", s=1), chunk(b"b\n", s=9))

    assert [(line.data, line.at) for line in found] == [(b"ab\n", NOW + timedelta(seconds=1))]


def test_an_endless_line_goes_on_in_pieces_with_one_time_stamp():
    found = lines(*[chunk(b"x" * 50_000) for _ in range(5)], chunk(b"\n"))
    shown = b"".join(map(Filter(LogOptions(timestamps=True)).shown, found))

    assert max(len(line.data) for line in found) <= PIECE_BYTES
    assert shown == b"2030-01-01T12:00:00.000000000Z " + b"x" * 250_000 + b"\n"


def test_the_limit_counts_what_is_sent_and_is_exact():
    limited = Filter(LogOptions(timestamps=True, limit_bytes=40))

    shown = [limited.shown(line) for line in lines(chunk(b"abcdefg\n"), chunk(b"hij\n"))]

    assert len(b"".join(shown)) == 40
    assert limited.full


def test_since_leaves_out_older_lines_whole():
    chosen = Filter(LogOptions(since=NOW + timedelta(seconds=5)))
    found = lines(chunk(b"old\n", s=1), chunk(b"x" * 70_000, s=1), chunk(b"\nnew\n", s=9))

    assert [line.data for line in found if chosen.wants(line)] == [b"new\n"]


def test_a_tail_is_of_lines_and_of_bounded_size():
    tail = Tail(2)
    for line in lines(chunk(b"a\nb\nc\nd")):
        tail.add(line)
    assert [line.data for line in tail.lines()] == [b"c\n", b"d"]

    tail = Tail(1_000_000)
    for number in range(3 * TAIL_BYTES // 1000):
        tail.add(Line(b"%0999d\n" % number, NOW, None, True, True))
    kept_lines = list(tail.lines())
    assert tail.cut
    assert sum(len(line.data) for line in kept_lines) <= TAIL_BYTES
    assert CUT.endswith(b"\n")


async def test_a_kept_tail_comes_back_as_it_was_and_says_when_it_was_cut():
    async def stream():
        for number in range(100):
            yield chunk(b"%d\n" % number, "stderr" if number % 2 else None, s=number)

    whole = await kept.gather(stream(), limit_bytes=1000)
    assert [each.data for each in kept.unpacked(kept.packed(whole))] == [b"%d\n" % n for n in range(100)]
    assert list(kept.unpacked(kept.packed(whole))) == whole

    cut = await kept.gather(stream(), limit_bytes=30)
    assert cut[0].data == kept.CUT
    assert sum(len(each.data) for each in cut[1:]) <= 30
    assert cut[-1].data == b"99\n"
