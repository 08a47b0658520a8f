"""The ledger's duty of the leader: APScheduler is its clock. A run that is missed is made up for once, and no
job ever runs beside itself. Nobody waits for any of it: a store or a cloud that is away is asked again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Protocol, cast

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.ledger import metrics
from app.ledger.bills import Reconciler
from app.ledger.budgets import Budgets
from app.ledger.prices import listed
from app.ledger.writer import Writer
from app.settings import Settings
from app.store import balances, ledger_metrics, ledger_periods, ledger_rules, ledger_upkeep
from app.store.engine import StoreUnavailable, begin
from catalog.offerings import Offerings
from providers.base import ProviderError, Throttled
from providers.capabilities import Bills, HasBalance

log = structlog.get_logger()

PRICES_EVERY_S = 60.0
BUDGETS_EVERY_S = 1.0
SERIES_EVERY_S = 1.0
BALANCES_EVERY_S = 300.0
SUMS_EVERY_S = 300.0
SUMS_GRACE_S = 3600.0  # a day is over for so long before it is added up


class Leadership(Protocol):
    """What is needed of a term."""

    @property
    def epoch(self) -> int | None: ...
    def valid(self) -> bool: ...


class Ledger:
    """One duty of the leader, made anew for each term."""

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        accounts: Accounts,
        offerings: Offerings,
        settings: Settings,
        installation: str,
        leadership: Leadership,
        budgets: Budgets | None = None,
    ) -> None:
        self._engine, self._accounts, self._offerings = engine, accounts, offerings
        self._settings, self._leadership = settings, leadership
        self._budgets = budgets
        self._writer = Writer(engine=engine, offerings=offerings)
        self._reconciler = Reconciler(
            engine=engine, installation=installation, settle_s=settings.bill_settle_s
        )
        self._ruled: set[tuple[str, str]] = set()
        self._priced = -1

    async def run(self) -> None:
        """Keep the books until cancelled."""
        clock: Any = cast(Any, AsyncIOScheduler)(timezone=UTC)
        for job, every_s in (
            (self.tick, self._settings.ledger_every_s),
            (self.budgets, max(BUDGETS_EVERY_S, self._settings.ledger_every_s)),
            (self.series, max(SERIES_EVERY_S, 3 * self._settings.ledger_every_s)),
            (self.prices, min(PRICES_EVERY_S, self._settings.offers_every_s)),
            (self.balances, BALANCES_EVERY_S),
            (self.sums, SUMS_EVERY_S),
            (self.bills, self._settings.bill_every_s),
        ):
            clock.add_job(
                self._job,
                "interval",
                args=(job,),
                id=job.__name__,
                seconds=every_s,
                next_run_time=datetime.now(UTC),
                coalesce=True,
                max_instances=1,
                misfire_grace_time=None,
            )
        clock.start()
        metrics.show()
        try:
            await asyncio.Event().wait()
        finally:
            metrics.hide()
            clock.shutdown(wait=False)

    async def _job(self, work: Callable[[int], Awaitable[None]]) -> None:
        """One run of one job; only while we lead, and whatever fails is tried again at its next turn."""
        epoch = self._leadership.epoch
        if epoch is None or not self._leadership.valid():
            return
        try:
            await work(epoch)
        except StoreUnavailable as error:
            log.info("ledger waits for the store", job=work.__name__, error=str(error)[:256])
        except DBAPIError as error:  # another leader was first; the next turn reads what it wrote
            log.warning("ledger refused", job=work.__name__, error=str(error.orig)[:256])

    async def tick(self, epoch: int) -> None:
        """Runs -> segments."""
        await self._rules(epoch)
        await self._writer.tick(epoch=epoch)

    async def budgets(self, epoch: int) -> None:
        """NodePools' budgets -> rows; what has been passed is told of."""
        if self._budgets is not None:
            await self._budgets.look(epoch=epoch)

    async def series(self, epoch: int) -> None:
        """What /metrics shows."""
        async with begin(self._engine) as conn:
            found = await ledger_metrics.read(conn, epoch=epoch)
        metrics.SHOWN.snapshot = metrics.Snapshot(**found)

    async def _rules(self, epoch: int) -> None:
        """Write down how each open account bills, before anything of it is derived."""
        for account in self._accounts:
            if account.key in self._ruled:
                continue
            async with begin(self._engine) as conn:
                await ledger_rules.put_rules(
                    conn,
                    provider=account.name,
                    account=account.account,
                    rules=account.traits.billing,
                    bills=isinstance(account.provider, Bills),
                    epoch=epoch,
                )
            self._ruled.add(account.key)

    async def prices(self, epoch: int) -> None:
        """What is listed -> price points."""
        version = self._offerings.version
        if version == self._priced:
            return
        for offers in self._offerings:
            async with begin(self._engine) as conn:
                await ledger_upkeep.list_prices(
                    conn,
                    provider=offers.provider,
                    account=offers.account,
                    rows=listed(offers.offerings),
                    epoch=epoch,
                )
        self._priced = version

    async def sums(self, epoch: int) -> None:
        """Days that are over -> sums; months long over -> closed, then archived, at last dropped."""
        async with begin(self._engine) as conn:
            days = await ledger_upkeep.due_days(conn, grace_s=SUMS_GRACE_S)
        for day in days:
            async with begin(self._engine) as conn:
                await ledger_upkeep.seal_day(conn, day, epoch=epoch)
        async with begin(self._engine) as conn:
            months = await ledger_periods.due_months(conn, after_s=self._settings.close_after_s)
        for month in months:
            async with begin(self._engine) as conn:
                if await ledger_periods.close_month(conn, month, epoch=epoch):
                    log.info("month closed", month=str(month))
        async with begin(self._engine) as conn:
            await ledger_periods.sum_months(conn, epoch=epoch)
        async with begin(self._engine) as conn:
            await ledger_periods.make_partitions(conn, epoch=epoch)
        await self._until_none(lambda conn: ledger_periods.archive(conn, epoch=epoch))
        keep = self._settings.segments_keep_months
        await self._until_none(lambda conn: ledger_periods.drop_old(conn, keep_months=keep, epoch=epoch))

    async def _until_none(self, work: Callable[[AsyncConnection], Awaitable[object]]) -> None:
        """Again and again, each in a short transaction, until there is nothing left."""
        while True:
            async with begin(self._engine) as conn:
                if not await work(conn):
                    return

    async def balances(self, epoch: int) -> None:
        """What is left of accounts that are paid in advance -> rows."""
        for account in list(self._accounts):
            provider = account.provider
            if not isinstance(provider, HasBalance):
                continue
            await account.budget.take(Urgency.LIST)
            try:
                told = await provider.balance()
            except Throttled as error:
                account.budget.pause(error.retry_after_s)
                continue
            except ProviderError as error:  # what is not told is not zero: the row before stays
                log.info("balance not told", provider=account.name, account=account.account, error=str(error))
                continue
            async with begin(self._engine) as conn:
                await balances.put(
                    conn,
                    provider=account.name,
                    account=account.account,
                    usd=told.usd,
                    usd_per_hour=told.burn_usd_per_hour,
                    epoch=epoch,
                )

    async def bills(self, epoch: int) -> None:
        """The clouds' own bills beside ours."""
        accounts: list[Account] = list(self._accounts)
        for account in accounts:
            await self._reconciler.account(account, epoch=epoch)
