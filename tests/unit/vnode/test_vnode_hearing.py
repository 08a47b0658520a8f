"""When the Node of an account says that nobody knows what becomes of its machines."""

import pytest

from app.inventory.rounds import Judged, Place
from app.vnode.hearing import Hearing
from tests.unit.vnode.vnode_clock import Clock

KEY = ("modal", "default")
PATIENCE_S = 60.0


class Heard:
    def __init__(self) -> None:
        self.clock, self.changes = Clock(), 0
        self.hearing = Hearing(KEY, patience_s=PATIENCE_S, clock=self.clock, changed=self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def round(self, unknown: str | None = None, *, region: str = "", provider: str = "modal") -> None:
        self.hearing.take(
            Judged(
                place=Place(provider=provider, account="default", region=region),
                account_id="a",
                began_at=self.clock(),
                ended_at=self.clock(),
                machines=(),
                claims=frozenset(),
                unknown=unknown,
            )
        )

    @property
    def status(self) -> str | None:
        said = self.hearing.said()
        return said[0] if said else None


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_nothing_is_said_before_anything_is_known(heard: Heard) -> None:
    assert heard.status is None


def test_a_whole_list_says_known_and_is_news_once(heard: Heard) -> None:
    heard.round()
    heard.round()

    assert (heard.status, heard.changes) == ("True", 1)


def test_a_short_silence_is_no_news(heard: Heard) -> None:
    heard.round()
    heard.clock.move(1)
    heard.round("timeout")
    heard.clock.move(PATIENCE_S - 1)
    heard.round("timeout")

    assert (heard.status, heard.changes) == ("True", 1)
    assert heard.hearing.due_s() == 1.0


def test_a_long_silence_is_news_once_with_the_words_it_began_with(heard: Heard) -> None:
    heard.round()
    for why in ("page 2: 500", "timeout", "connection refused"):
        heard.round(why)
        heard.clock.move(PATIENCE_S)

    assert heard.status == "Unknown"
    assert "page 2: 500" in heard.hearing.said()[2]  # type: ignore[index]
    heard.round("timeout")
    assert heard.changes == 2


def test_one_silent_region_of_several_is_named(heard: Heard) -> None:
    heard.round(region="us")
    heard.round("timeout", region="eu")
    heard.clock.move(PATIENCE_S)
    heard.round(region="us")
    heard.round("timeout", region="eu")

    assert heard.status == "Unknown"
    assert " in eu " in heard.hearing.said()[2]  # type: ignore[index]


def test_a_region_that_is_not_listed_any_more_is_no_silence(heard: Heard) -> None:
    heard.round("timeout", region="eu")
    for _ in range(6):
        heard.clock.move(PATIENCE_S)
        heard.round(region="us")

    assert heard.status == "True"


def test_the_first_whole_list_after_a_silence_ends_it(heard: Heard) -> None:
    heard.round("timeout")
    heard.clock.move(PATIENCE_S)
    heard.round("timeout")
    heard.round()

    assert heard.status == "True"


def test_an_account_that_does_not_open_is_silent_too(heard: Heard) -> None:
    heard.clock.move(PATIENCE_S)

    assert heard.status == "Unknown"


def test_other_accounts_are_not_heard(heard: Heard) -> None:
    heard.round(provider="aws")

    assert heard.status is None
