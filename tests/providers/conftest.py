"""Clouds and providers for the conformance rules.

A rule asks for ``pair``, whose cloud all rules share and leave without a fault, or for ``new_pair`` where its
scenario differs or no other rule's machines may be there. Each is one process a row; the provider is the
rule's own.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from providers.base import (
    DEFAULT_ACCOUNT,
    Accelerator,
    Accepted,
    Attempt,
    ClaimUid,
    Machine,
    Offering,
    Provider,
    ProviderConfig,
    Rejection,
    Round,
    Tier,
    Workload,
)
from providers.fake.adapter import FakeProvider
from tests.providers.rows import ROWS, Row
from tests.support.clouds import FakeCloud

H100 = Accelerator(type="H100", count=8)
CloudOf = Callable[[Row, str], Awaitable[FakeCloud]]
_numbers = itertools.count(1)


@dataclass(slots=True)
class Pair:
    """A provider and the cloud that it talks to."""

    row: Row
    cloud: FakeCloud
    provider: Provider
    region: str
    offerings: dict[tuple[str, Tier, str], Offering] = field(default_factory=dict)

    @property
    def regions(self) -> frozenset[str]:
        return frozenset({self.region})

    async def offering(
        self, *, tier: Tier = Tier.ON_DEMAND, accelerator: Accelerator | None = H100
    ) -> Offering:
        if not self.offerings:
            for offer in await self.provider.offers():
                key = (offer.region, offer.tier, offer.accelerator.key if offer.accelerator else "")
                self.offerings[key] = offer
        return self.offerings[(self.region, tier, accelerator.key if accelerator else "")]

    async def provision(
        self,
        attempt: Attempt | None = None,
        workload: Workload | None = None,
        *,
        avoid: frozenset[str] = frozenset(),
    ) -> Accepted | Rejection:
        attempt = attempt or self.attempt()
        offering = await self.offering(tier=attempt.tier)
        return await self.provider.provision(
            attempt, workload or a_workload(), offering=offering, access=None, avoid=avoid
        )

    async def rented(self, attempt: Attempt | None = None, workload: Workload | None = None) -> Accepted:
        answer = await self.provision(attempt, workload)
        assert isinstance(answer, Accepted), answer
        return answer

    def attempt(self, **changes: Any) -> Attempt:
        return an_attempt(**({"region": self.region} | changes))

    async def round(self) -> Round:
        (only,) = await self.provider.list(self.regions)
        return only

    async def found(self, identity: str) -> list[Machine]:
        """The machines of a complete list that carry this identity and are there."""
        seen = await self.round()
        assert seen.unknown is None, seen.unknown
        return [machine for machine in seen.machines if machine.identity == identity and machine.exists]

    async def at_cloud(self, identity: str) -> list[dict[str, Any]]:
        return await self.cloud.machines(name=identity)


def an_attempt(**changes: Any) -> Attempt:
    """A valid attempt, different from every other; a test names only what it is about."""
    number = next(_numbers)
    fields: dict[str, Any] = {
        "claim_uid": ClaimUid(f"claim-{number}"),
        "number": 1,
        "sequence": number,
        "identity": f"nb-test-{number}",
        "token": f"token-{number}",
        "account": DEFAULT_ACCOUNT,
        "region": "",
        "tier": Tier.ON_DEMAND,
        "ceiling_usd_per_hour": None,
    }
    return Attempt(**(fields | changes))


def a_workload(**changes: Any) -> Workload:
    return Workload(**({"image": "app:1", "accelerator": H100} | changes))


async def opened(row: Row, cloud: FakeCloud, **changes: Any) -> Provider:
    fields = {
        "name": row.name,
        "installation": "test",
        "options": row.options(cloud),
        "credentials": row.credentials,
    } | changes
    provider = await row.factory.open(ProviderConfig(**fields))
    await provider.account()  # as the controller does before anything else
    return provider


@pytest.fixture(scope="session")
async def shared_clouds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CloudOf]:
    """Running simulators by row and use, each started when first asked for."""
    clouds: dict[tuple[str, str], FakeCloud] = {}
    async with AsyncExitStack() as stack:

        async def cloud_of(row: Row, use: str) -> FakeCloud:
            if (row.name, use) not in clouds:
                folder: Path = tmp_path_factory.mktemp(row.name)
                running = FakeCloud.running(folder, scenario=row.scenario, simulator=row.simulator)
                clouds[(row.name, use)] = await stack.enter_async_context(running)
            return clouds[(row.name, use)]

        yield cloud_of


# The fake clouds in every run; the simulators of real ones, which are slower, with the slow tests.
EVERY_ROW = [
    row if row.factory is FakeProvider else pytest.param(row, marks=pytest.mark.slow) for row in ROWS
]


@pytest.fixture(params=EVERY_ROW, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    """Every row; a rule for some of them parametrizes ``row`` itself, with `having`."""
    found: Row = request.param
    return found


@pytest.fixture
async def pair(row: Row, shared_clouds: CloudOf) -> AsyncIterator[Pair]:
    cloud = await shared_clouds(row, "as it is")
    provider = await opened(row, cloud)
    yield Pair(row=row, cloud=cloud, provider=provider, region=_region(row))
    await cloud.clear_faults()
    await provider.close()


@pytest.fixture
async def new_pair(row: Row, shared_clouds: CloudOf) -> AsyncIterator[Callable[..., Awaitable[Pair]]]:
    """Make a pair, once, with a cloud that begins anew: scenario fields, ``config`` for the provider's."""
    cloud = await shared_clouds(row, "begun anew")
    async with AsyncExitStack() as stack:

        async def make(*, config: dict[str, Any] | None = None, **scenario: Any) -> Pair:
            await cloud.reset({**row.scenario, **scenario})
            provider = await opened(row, cloud, **(config or {}))
            stack.push_async_callback(provider.close)
            return Pair(row=row, cloud=cloud, provider=provider, region=_region(row))

        yield make
        if cloud.runs:
            await cloud.clear_faults()


def _region(row: Row) -> str:
    return str((row.scenario.get("regions") or [""])[0])
