"""The conformance matrix: one row for each provider, with the simulator that its adapter is tested against.

Adding a provider is adding a row. Rules that not every cloud can show take their rows by feature.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from providers.base import ProviderFactory, RejectionKind, Tier
from providers.fake.adapter import FakeProvider
from providers.runpod.adapter import RunPod
from tests.support.clouds import SMALL, FakeCloud


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``scenario`` is the engine's; its offers include H100 with 8 at 4 dollars a GPU, in every region.

    ``features``: ``idempotent`` (creates by token), ``queue`` (orders taken without capacity), ``code`` (exit
    codes), ``ends`` (a workload can end by itself), ``total`` (a list that counts itself), ``pages``,
    ``price`` (ceilings), ``hosts``, ``restarts`` (of which ``no-restarts`` can be told not to), ``stop``,
    ``grace`` (a stop that can be ignored until its grace is over), ``lifetime``, ``spot``, ``list-account``
    (a list names its account), ``disk-price`` (the cloud says what disk costs), ``processes`` (output,
    commands, ports and usage). ``extra_usd_per_hour`` is what an order costs beside its GPUs. ``wide`` are
    refusals that hold for the whole account.
    """

    name: str
    factory: ProviderFactory
    scenario: Mapping[str, Any]
    options: Callable[[FakeCloud], dict[str, str]]
    features: frozenset[str]
    simulator: str = "fake"
    credentials: Mapping[str, str] = field(default_factory=dict)
    extra_usd_per_hour: Decimal = Decimal(0)
    wide: frozenset[RejectionKind] = frozenset()

    @property
    def tier(self) -> Tier:
        """The one that rules use which hold in every tier."""
        return Tier.SPOT if "spot" in self.features else Tier.ON_DEMAND

    def __str__(self) -> str:
        return self.name


FAKE = frozenset(
    {
        *(
            "queue",
            "code",
            "ends",
            "total",
            "pages",
            "price",
            "hosts",
            "restarts",
            "no-restarts",
            "stop",
            "grace",
        ),
        *("lifetime", "spot", "list-account", "disk-price"),
    }
)

# RunPod as the rules need it: no data centres, so that everything is in one place, and all of it at once.
RUNPOD: Mapping[str, Any] = {
    "cloud": "runpod",
    "account": "acct-1",
    "disk_usd_per_gib_hour": "0.00013698630136986301",
    "life": {"boot_s": 0, "exit_restarts": True},
    "billing": {"states": ["queued", "booting", "running"]},
    "offers": [
        {"accelerator": "H100", "counts": [1, 2, 4, 8], "usd_per_hour": {"SECURE": "4.00"}},
        {"accelerator": "A40", "counts": [1], "usd_per_hour": {"SECURE": "0.44", "COMMUNITY": "0.33"}},
    ],
}

ROWS = (
    Row(
        name="fake",
        factory=FakeProvider,
        scenario=SMALL | {"idempotent_for_s": 3600, "history_s": 3600},
        options=lambda cloud: {"url": cloud.url},
        features=FAKE | {"idempotent"},
    ),
    Row(
        name="fake-without-regions",
        factory=FakeProvider,
        scenario={key: value for key, value in SMALL.items() if key != "regions"},
        options=lambda cloud: {"url": cloud.url},
        features=FAKE,
    ),
    Row(
        name="runpod",
        factory=RunPod,
        simulator="runpod",
        scenario=RUNPOD,
        options=lambda cloud: {"url": cloud.url, "list_every_s": "0.2"},
        credentials={"RUNPOD_API_KEY": "rpa_test"},
        features=frozenset({"pages", "restarts"}),
        extra_usd_per_hour=20 * Decimal("0.10") / 730,
        wide=frozenset({RejectionKind.QUOTA}),
    ),
    Row(
        name="fake-with-processes",
        factory=FakeProvider,
        scenario=SMALL | {"processes": {}},
        options=lambda cloud: {"url": cloud.url},
        features=frozenset({"code", "processes", "stop"}),
    ),
)


def having(*features: str) -> list[Row]:
    """The rows that can show all of these."""
    return [row for row in ROWS if row.features >= set(features)]
