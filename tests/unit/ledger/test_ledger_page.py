"""The page stands alone, is whole HTML, and shows what it was given, whatever names there are."""

from decimal import Decimal
from html.parser import HTMLParser

import pytest

from app.ledger.page import Report, _axis, page

VOID = {"meta", "rect", "line", "br"}


class Whole(HTMLParser):
    """Every tag that is opened is closed, in order; nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}, (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_is_whole_fetches_nothing_and_escapes_every_name():
    name = '<script>alert("x")</script>'
    rows = [("2026-03-01", name, Decimal("14919.23")), ("2026-03-02", "modal", Decimal("0.004"))]
    shown = page(
        Report(
            title="What the machines cost",
            about="March",
            total=Decimal("14919.234"),
            burn_usd_per_hour=Decimal(0),
            forecast=Decimal(1),
            saved=Decimal(0),
            wasted=Decimal("0.5"),
            unpriced=3,
            by_hour=rows,
            by_team=rows,
            by_provider=[],
            waste=[("booting", Decimal("0.5"))],
            forecasts=[
                {
                    "namespace": name,
                    "spent": Decimal(1),
                    "run_rate_forecast": None,
                    "trend_forecast": Decimal(2),
                }
            ],
            budgets=[
                {
                    "name": name,
                    "used_ratio": Decimal(7),
                    "spent": Decimal(7),
                    "amount": Decimal(1),
                    "period": "day",
                    "action": "Alert",
                    "label_action": None,
                }
            ],
            workloads=[(name, Decimal(2), Decimal(3))],
        )
    )
    parser = Whole()
    parser.feed(shown)

    assert parser.open == []
    assert "<script" not in shown
    assert {"$14,919.23", "$0.5000", "3", name, "unknown"} <= set(parser.words)


@pytest.mark.parametrize(("usd", "shown"), [
    ("0", "$0.00"), ("0.0041", "$0.004"), ("99.5", "$99.50"), ("102.48", "$102"), ("14919.23", "$14.9k"),
    ("149190", "$149k"), ("1491900", "$1.5M"),
])  # fmt: skip
def test_an_axis_has_room_for_six_characters(usd: str, shown: str):
    assert _axis(Decimal(usd)) == shown
    assert len(shown) <= 6
