"""A credential that was changed is in use without a restart, and nothing is lost on the way."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.inventory.accounts import Account, Accounts
from app.kube.credentials import secret_names
from app.placement.market import Adapters
from app.settings import Settings, load, parse_providers
from providers.base import CredentialRejected, Terminated
from tests.providers.conftest import a_workload, an_attempt
from tests.providers.rows import RUNPOD
from tests.support.clouds import FakeCloud
from tests.support.composed import until

OLD, NEW = "rpa_old", "rpa_new"


def settings_of(cloud: FakeCloud) -> Settings:
    env = {"NEBULA_PROFILE": "fast", "NEBULA_LIST_REST_S": "0.2", "NEBULA_LIST_BUSY_S": "0.2"}
    settings = load({}, env)
    return settings.model_copy(update={"providers": parse_providers(f"runpod,url={cloud.url}")})


class Secrets:
    """What the account's Secret holds; None: it cannot be read."""

    def __init__(self, **entries: str) -> None:
        self.entries: dict[str, str] | None = entries

    async def of(self, _entry: object) -> Mapping[str, str] | None:
        return None if self.entries is None else dict(self.entries)


async def opened(accounts: Accounts) -> Account:
    account: Account = await until(lambda: accounts.get(("runpod", "default")), what="the account is open")
    return account


async def test_fc_099_a_new_key_is_picked_up_and_a_pending_delete_ends(tmp_path: Path):
    async with FakeCloud.running(
        tmp_path, scenario=RUNPOD | {"credential": OLD}, simulator="runpod"
    ) as cloud:
        secrets = Secrets(RUNPOD_API_KEY=OLD)
        accounts = Accounts(settings_of(cloud), "test", credentials=secrets.of)
        running = asyncio.create_task(accounts.run())
        account = await opened(accounts)
        before = account.account_id
        offers = await account.provider.offers()
        rented = await account.provider.provision(
            an_attempt(), a_workload(), offering=offers[0], access=None, avoid=frozenset()
        )
        # The key is revoked: the simulator goes on with its state and another credential.
        await cloud.stop()
        text = cloud.scenario_file.read_text().replace(OLD, NEW)
        cloud.scenario_file.write_text(text)
        await cloud.start()
        with pytest.raises(CredentialRejected):
            await account.provider.terminate(rented.ref)  # type: ignore[union-attr]

        old = account.provider
        secrets.entries = None  # the API server is away: nothing changes
        await asyncio.sleep(0.5)
        assert account.provider is old
        secrets.entries = {"RUNPOD_API_KEY": "rpa_wrong"}  # nor by a key that does not work
        await asyncio.sleep(0.5)
        assert account.provider is old
        secrets.entries = {"RUNPOD_API_KEY": NEW}
        await until(lambda: account.provider is not old, what="the new key is in use")

        assert accounts.get(("runpod", "default")) is account
        assert account.account_id == before
        assert await account.provider.terminate(rented.ref) is Terminated.ACCEPTED  # type: ignore[union-attr]
        assert await cloud.alive() == []
        running.cancel()
        await asyncio.wait([running])


async def test_an_account_without_a_key_opens_once_its_secret_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    async with FakeCloud.running(
        tmp_path, scenario=RUNPOD | {"credential": OLD}, simulator="runpod"
    ) as cloud:
        secrets = Secrets()
        accounts = Accounts(settings_of(cloud), "test", credentials=secrets.of)
        running = asyncio.create_task(accounts.run())
        await accounts.tried()
        assert accounts.get(("runpod", "default")) is None
        why = Adapters(accounts).closed(("runpod", "default"))
        assert "put RUNPOD_API_KEY into the account's Secret" in why

        secrets.entries = {"RUNPOD_API_KEY": OLD}

        assert (await opened(accounts)).adapter == "runpod"
        assert accounts.trouble == {}
        running.cancel()
        await asyncio.wait([running])


async def test_a_secret_that_cannot_be_read_is_not_replaced_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the environment happens to hold may be another account's, and machines would be rented there."""
    monkeypatch.setenv("RUNPOD_API_KEY", OLD)
    async with FakeCloud.running(
        tmp_path, scenario=RUNPOD | {"credential": OLD}, simulator="runpod"
    ) as cloud:
        secrets = Secrets()
        secrets.entries = None
        accounts = Accounts(settings_of(cloud), "test", credentials=secrets.of)
        running = asyncio.create_task(accounts.run())
        await accounts.tried()
        assert accounts.get(("runpod", "default")) is None
        assert "its Secret cannot be read now" in accounts.trouble[("runpod", "default")]

        secrets.entries = {}  # it was asked for, and is not there: then the environment's are meant

        assert (await opened(accounts)).adapter == "runpod"
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        ("runpod", ["nebula-runpod", "aibrix-neocloud-node-runpod"]),
        ("research=runpod", ["nebula-research", "aibrix-neocloud-node-runpod"]),
        ("runpod/team-b", ["nebula-runpod-team-b"]),
    ],
)
def test_where_an_accounts_credentials_are_looked_for(configured: str, names: list[str]):
    (entry,) = parse_providers(configured)

    assert list(secret_names(entry)) == names
