"""The configured provider accounts: found by entry point, opened when enabled, retried while unreachable.

An account that cannot be opened yet is known and unusable: nothing is rented there and nothing concluded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import cast

import structlog

from app.inventory.budget import CallBudget
from app.settings import ProviderEntry, Settings
from providers.base import Provider, ProviderConfig, ProviderError, ProviderFactory, Traits

log = structlog.get_logger()
GROUP = "nebula.providers"
_TROUBLE_CHARS = 200


class UnknownAdapter(ValueError):
    """A configured adapter that no installed package offers; the message lists those that are."""


class BadOptions(ValueError):
    """An account whose options cannot be used: only another configuration can mend it."""


class SameAccount(ProviderError):
    """Two configured names lead to one account of a cloud: each machine would be seen, and judged, twice."""


@dataclass(slots=True, kw_only=True)
class Account:
    """One opened account of one cloud, with its call budget and the cloud's own id of it."""

    provider: Provider
    name: str
    account: str
    adapter: str
    account_id: str
    traits: Traits
    budget: CallBudget
    settle_after_s: float
    call_timeout_s: float
    provision_timeout_s: float
    boot_deadline_s: float
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    machine_secret: bytes = field(default=b"", repr=False)

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.account)


async def _none(_entry: ProviderEntry) -> Mapping[str, str]:
    return {}


@dataclass(slots=True)
class Accounts:
    """Every configured account; ``get`` gives it once it is open.

    ``credentials`` gives the entries of an account's Secret as they are now. An account is opened anew when
    they change, and what is on its way with the old ones ends first. None: they cannot be read now; then
    nothing changes, and an account that is not open is not opened by what the environment happens to hold.
    """

    settings: Settings
    installation: str
    credentials: Callable[[ProviderEntry], Awaitable[Mapping[str, str] | None]] = _none
    machine_secret: bytes = field(default=b"", repr=False)
    """What the keys of machines are derived from (`app.machines.keys`); empty: machines get none."""
    trouble: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why accounts are not open, those that were tried in vain."""
    _open: dict[tuple[str, str], Account] = field(default_factory=dict)
    _listeners: list[Callable[[Account], None]] = field(default_factory=list)
    _untried: set[tuple[str, str]] = field(init=False)
    _tried: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._untried = {entry.key for entry in self.settings.providers}
        if not self._untried:
            self._tried.set()

    def names(self) -> frozenset[str]:
        """The configured provider names, open or not."""
        return frozenset(entry.name for entry in self.settings.providers)

    def configured(self, key: tuple[str, str]) -> bool:
        return any(entry.key == key for entry in self.settings.providers)

    def get(self, key: tuple[str, str]) -> Account | None:
        return self._open.get(key)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._open.values())

    async def tried(self) -> None:
        """Return once each configured account was opened, or has failed to open, once."""
        await self._tried.wait()

    def on_open(self, listener: Callable[[Account], None]) -> None:
        """Call ``listener`` for each account, those open already included."""
        self._listeners.append(listener)
        for account in self._open.values():
            listener(account)

    @contextmanager
    def listeners_of_a_term(self) -> Iterator[None]:
        """Forget, at the end of the block, the listeners that were added inside it."""
        before = list(self._listeners)
        try:
            yield
        finally:
            self._listeners[:] = before

    async def run(self) -> None:
        """Open every configured account, each retried on its own; wait until cancelled, then close them.

        Raises:
            BadOptions: an adapter refuses its options, or two names turn out to be one account at the start.
        """
        factories = [(entry, load_factory(entry.adapter)) for entry in self.settings.providers]
        try:
            async with asyncio.TaskGroup() as tasks:
                for entry, factory in factories:
                    tasks.create_task(self._keep_open(entry, factory), name=f"open-{entry.name}")
                await asyncio.Event().wait()
        finally:
            for account in self._open.values():
                await account.provider.close()
            self._open.clear()

    async def _keep_open(self, entry: ProviderEntry, factory: ProviderFactory) -> None:
        wait_s = self.settings.backoff_base_s
        while entry.key not in self._open:
            try:
                account = await self._open_one(entry, factory)
                self._open[entry.key] = account
                self.trouble.pop(entry.key, None)
            except SameAccount as error:
                if not self._tried.is_set():  # later, what runs is worth more than what is refused
                    raise BadOptions(f"--providers: {error}") from error
                log.error("account refused", provider=entry.name, account=entry.account, error=str(error))
                await asyncio.sleep(self.settings.backoff_max_s)
            except (ProviderError, TimeoutError) as error:
                log.warning(
                    "account not usable yet", provider=entry.name, account=entry.account, error=str(error)
                )
                self.trouble[entry.key] = str(error)[:_TROUBLE_CHARS]
                self._note_tried(entry)
                await asyncio.sleep(wait_s)
                wait_s = min(self.settings.backoff_max_s, wait_s * 2)
            else:
                log.info(
                    "account open", provider=entry.name, account=entry.account, cloud_id=account.account_id
                )
                for listener in self._listeners:
                    listener(account)
                self._note_tried(entry)
        await self._keep_credentials(entry, factory)

    async def _keep_credentials(self, entry: ProviderEntry, factory: ProviderFactory) -> None:
        """Open the account again with each new credential that works; until one does, the old one stays.

        The `Account` stays the same object, whose provider is another: whoever holds it goes on.
        """
        account = self._open[entry.key]
        while True:
            await asyncio.sleep(self.settings.list_rest_s)
            given = await self.credentials(entry)
            if given is None or given == account.credentials:
                continue
            try:
                fresh = await self._open_one(entry, factory)
            except (ProviderError, BadOptions, TimeoutError) as error:
                log.warning(
                    "new credential not usable", provider=entry.name, account=entry.account, error=str(error)
                )
                continue
            old, account.provider = account.provider, fresh.provider
            account.account_id, account.credentials = fresh.account_id, fresh.credentials
            log.info(
                "new credential in use", provider=entry.name, account=entry.account, cloud_id=fresh.account_id
            )
            await asyncio.sleep(account.provision_timeout_s)  # calls that are on their way use the old one
            await old.close()

    def _must_be_alone(self, entry: ProviderEntry, account_id: str) -> None:
        for other in self._open.values():
            if other.key != entry.key and (other.adapter, other.account_id) == (entry.adapter, account_id):
                raise SameAccount(
                    f"{other.name}/{other.account} and {entry.name}/{entry.account} are one account of"
                    f" {entry.adapter}, {account_id}: configure it under one name"
                )

    def _note_tried(self, entry: ProviderEntry) -> None:
        self._untried.discard(entry.key)
        if not self._untried:
            self._tried.set()

    async def _open_one(self, entry: ProviderEntry, factory: ProviderFactory) -> Account:
        credentials = await self.credentials(entry)
        if credentials is None:  # those of the environment may be another account's
            raise ProviderError("its Secret cannot be read now, and the environment does not replace it")
        config = ProviderConfig(
            name=entry.name,
            account=entry.account,
            installation=self.installation,
            options=entry.options,
            credentials=credentials,
            settle_after_s=self.settings.settle_after_s,
            call_timeout_s=self.settings.call_timeout_s,
            dead_man_s=self.settings.dead_man_s or None,
        )
        try:
            provider = await factory.open(config)
        except ValueError as error:
            raise BadOptions(f"--providers: {entry.name}/{entry.account}: {error}") from error
        try:
            account_id = await provider.account()
            self._must_be_alone(entry, account_id)
        except BaseException:
            await provider.close()
            raise
        traits = provider.traits
        return Account(
            provider=provider,
            name=entry.name,
            account=entry.account,
            adapter=entry.adapter,
            account_id=account_id,
            credentials=credentials,
            machine_secret=self.machine_secret,
            traits=traits,
            budget=CallBudget(rate=traits.calls_per_s, burst=traits.call_burst),
            settle_after_s=traits.settle_after_s
            if self.settings.settle_after_s is None
            else self.settings.settle_after_s,
            call_timeout_s=traits.call_timeout_s
            if self.settings.call_timeout_s is None
            else self.settings.call_timeout_s,
            provision_timeout_s=traits.provision_deadline_s
            if self.settings.call_timeout_s is None
            else self.settings.call_timeout_s,
            boot_deadline_s=self.settings.boot_deadline_s or traits.boot_deadline_s,
        )


def load_factory(adapter: str) -> ProviderFactory:
    """The entry point's object, imported only now.

    Raises:
        UnknownAdapter: nothing installed offers it.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if adapter not in found:
        near = get_close_matches(adapter, found, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UnknownAdapter(f"no adapter {adapter!r}{hint}; installed: {', '.join(sorted(found)) or 'none'}")
    return cast(ProviderFactory, found[adapter].load())


def installed_adapters() -> frozenset[str]:
    """The names of the adapters that are installed, none of them imported."""
    return frozenset(point.name for point in entry_points(group=GROUP))


def check_adapters(entries: Sequence[ProviderEntry]) -> list[str]:
    """One line for each configured adapter that is not installed."""
    errors = []
    for adapter in sorted({entry.adapter for entry in entries}):
        try:
            load_factory(adapter)
        except UnknownAdapter as error:
            errors.append(f"--providers: {error}")
    return errors
