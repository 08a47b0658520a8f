"""Two configured names that lead to one account of a cloud: each machine would be seen, and judged, twice."""

import asyncio

import pytest

from app.inventory.accounts import Accounts, BadOptions
from app.inventory.identity import new_installation
from app.settings import Settings, load
from tests.support.clouds import SMALL, FakeCloud
from tests.support.composed import until


def twice(cloud: FakeCloud, **more: str) -> Settings:
    names = {"one": cloud.url, "two": cloud.url} | more
    providers = " ".join(f"{name}=fake,url={url}" for name, url in names.items())
    return load({"profile": "fast", "providers": providers}, {})


async def test_one_account_under_two_names_is_refused_at_the_start(cloud: FakeCloud):
    accounts = Accounts(twice(cloud), new_installation())

    with pytest.raises(ExceptionGroup) as refused:
        async with asyncio.timeout(20):
            await accounts.run()

    (error,) = refused.value.exceptions
    assert isinstance(error, BadOptions)
    assert "one account of fake, acct-1: configure it under one name" in str(error)
    assert "one/default" in str(error)
    assert "two/default" in str(error)


async def test_a_name_that_turns_out_to_be_the_same_account_later_is_left_closed(cloud: FakeCloud):
    """What runs by then is worth more than what is refused."""
    late = await cloud.add_fault("status", verb="account", status=500, unlimited=True, skip=1)
    accounts = Accounts(twice(cloud), new_installation())
    running = asyncio.create_task(accounts.run())
    try:
        await asyncio.wait_for(accounts.tried(), 20)
        (first,) = accounts
        calls = (await cloud.truth())["calls"]["account"]

        await cloud.clear_faults(late)

        async def asked_again() -> bool:
            return (await cloud.truth())["calls"]["account"] > calls + 1

        await until(asked_again)
        assert [account.key for account in accounts] == [first.key]
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "scenario", [{key: SMALL[key] for key in SMALL if key != "account"}], ids=["unnamed"]
)
async def test_a_simulated_account_that_nobody_names_is_one_of_its_own_and_stays_so(cloud: FakeCloud):
    account = (await cloud.truth())["account_id"]

    await cloud.kill()
    await cloud.start()
    again = (await cloud.truth())["account_id"]
    await cloud.control("POST", "/sim/reset")

    assert again == account
    assert (await cloud.truth())["account_id"] != account
