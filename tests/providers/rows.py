"""The conformance matrix: one row for each provider, with the simulator that its adapter is tested against.

Adding a provider is adding a row. Rules that not every cloud can show take their rows by feature.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from providers.base import ProviderFactory
from providers.fake.adapter import FakeProvider
from tests.support.clouds import SMALL, FakeCloud


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``scenario`` is the engine's; its offers include H100 with 8 and no accelerator, in every region.

    ``features``: ``idempotent`` (creates by token), ``queue`` (orders taken without capacity), ``code`` (exit
    codes), ``total`` (a list that counts itself), ``pages``, ``price`` (ceilings), ``hosts``, ``restarts``,
    ``grace`` (a stop that can be ignored until its grace is over), ``processes`` (output,
    commands, ports and usage).
    """

    name: str
    factory: ProviderFactory
    scenario: Mapping[str, Any]
    options: Callable[[FakeCloud], dict[str, str]]
    features: frozenset[str]

    def __str__(self) -> str:
        return self.name


ROWS = (
    Row(
        name="fake",
        factory=FakeProvider,
        scenario=SMALL | {"idempotent_for_s": 3600, "history_s": 3600},
        options=lambda cloud: {"url": cloud.url},
        features=frozenset(
            {"idempotent", "queue", "code", "total", "pages", "price", "hosts", "restarts", "grace"}
        ),
    ),
    Row(
        name="fake-without-regions",
        factory=FakeProvider,
        scenario={key: value for key, value in SMALL.items() if key != "regions"},
        options=lambda cloud: {"url": cloud.url},
        features=frozenset({"queue", "code", "total", "pages", "price", "hosts", "restarts", "grace"}),
    ),
    Row(
        name="fake-with-processes",
        factory=FakeProvider,
        scenario=SMALL | {"processes": {}},
        options=lambda cloud: {"url": cloud.url},
        features=frozenset({"code", "processes"}),
    ),
)


def having(*features: str) -> list[Row]:
    """The rows that can show all of these."""
    return [row for row in ROWS if row.features >= set(features)]
