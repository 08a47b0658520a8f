"""Opening the fake provider: its options, its names, and what it learns from the cloud."""

import asyncio
from pathlib import Path

import pytest

from app.processes import free_ports
from providers.base import BillsFrom, BillsUntil, Egress, EgressMode, ProviderConfig, Tier, Unavailable
from providers.fake.adapter import FakeProvider
from tests.providers.conftest import a_workload
from tests.support.clouds import SMALL, FakeCloud


def config(**changes: object) -> ProviderConfig:
    fields = {"name": "modal", "installation": "test", "options": {"url": "http://127.0.0.1:1"}}
    return ProviderConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "url"),
        ({"url": "127.0.0.1:9"}, "url"),
        ({"url": "http://127.0.0.1:1", "regoin": "x"}, "regoin"),
        ({"url": "http://127.0.0.1:1", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
async def test_a_wrong_option_is_named(options: dict[str, str], named: str):
    with pytest.raises(ValueError, match=named):
        await FakeProvider.open(config(options=options))


async def test_a_cloud_that_does_not_answer_at_open_is_tried_again_later():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"

    with pytest.raises(Unavailable):
        await FakeProvider.open(config(options={"url": url}))


async def test_one_adapter_serves_two_clouds_under_two_names(tmp_path: Path):
    async with (
        FakeCloud.running(tmp_path / "a", scenario=SMALL | {"account": "acct-a"}) as first,
        FakeCloud.running(tmp_path / "b", scenario=SMALL | {"account": "acct-b"}) as second,
    ):
        one = await FakeProvider.open(config(name="modal", options={"url": first.url}))
        two = await FakeProvider.open(config(name="aws", account="eu", options={"url": second.url}))

        assert [await one.account(), await two.account()] == ["acct-a", "acct-b"]
        assert {(offer.provider, offer.account) for offer in await one.offers()} == {("modal", "default")}
        assert {(offer.provider, offer.account) for offer in await two.offers()} == {("aws", "eu")}
        await asyncio.gather(one.close(), two.close())


async def test_what_kind_of_cloud_it_is_comes_from_the_cloud(tmp_path: Path):
    scenario = {
        "regions": ["r1"],
        "idempotent_for_s": 600,
        "lag": {"list_create_s": 5},
        "completion": "ended",
        "life": {"max_s": 86400, "exited_s": 30},
        "history_s": 60,
        "billing": {"states": ["running"], "minimum_s": 60},
        "offers": [{"accelerator": "T4", "usd_per_hour": {"Spot": "0.2"}}],
    }
    async with FakeCloud.running(tmp_path, scenario=scenario) as cloud:
        provider = await FakeProvider.open(config(options={"url": cloud.url}))
        traits = provider.traits
        await provider.close()

    assert traits.tiers == {Tier.SPOT}
    assert traits.replay_for_s == 600
    assert traits.settle_after_s == 15
    assert traits.completion == "ended"
    assert traits.max_lifetime_s == 86400
    assert traits.ended_listed_s == 90
    assert traits.lists_by_region
    assert traits.needs_accelerator
    (rule,) = traits.billing
    assert (rule.starts, rule.until, rule.minimum_s) == (BillsFrom.STARTED, BillsUntil.ENDED, 60)


async def test_configured_times_win_over_what_the_cloud_says(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        provider = await FakeProvider.open(
            config(options={"url": cloud.url}, settle_after_s=2.0, call_timeout_s=1.5)
        )
        await provider.close()

    assert provider.traits.settle_after_s == 2.0
    assert provider.traits.call_timeout_s == provider.traits.provision_deadline_s == 1.5


async def test_the_credential_comes_from_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_CLOUD_TOKEN", "tok-12345")
    async with FakeCloud.running(tmp_path, scenario=SMALL | {"credential": "tok-12345"}) as cloud:
        with_token = await FakeProvider.open(
            config(options={"url": cloud.url, "token_env": "MY_CLOUD_TOKEN"})
        )
        without = await FakeProvider.open(config(options={"url": cloud.url}))

        assert await with_token.account() == "acct-1"
        with pytest.raises(Unavailable) as caught:
            await without.account()
        await asyncio.gather(with_token.close(), without.close())

    assert "tok-12345" not in repr(with_token) + repr(with_token._client) + str(caught.value)


async def test_a_workload_that_it_cannot_keep_from_the_network_is_refused(tmp_path: Path):
    async with FakeCloud.running(tmp_path, scenario=SMALL) as cloud:
        provider = await FakeProvider.open(config(options={"url": cloud.url}))
        await provider.close()

    assert provider.validate(a_workload()) is None
    assert "Blocked" in str(provider.validate(a_workload(egress=Egress(mode=EgressMode.BLOCKED))))
    assert "FAKE_EXIT_CODE" in str(provider.validate(a_workload(env={"FAKE_EXIT_CODE": "one"})))
