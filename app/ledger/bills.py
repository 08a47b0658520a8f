"""The ledger held against the clouds' own bills, where a cloud tells one.

The bill is never a source of segments. A closed run whose final bill says something else gets one adjustment
of the exact difference, ``invoice_true_up``; a difference that the bill's own rounding explains is none. What
a cloud charges for a machine of ours that no row knows is written down the same way: money is never lost.
"""

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.inventory.identity import parse
from app.ledger.rules import product, total
from app.store import bills
from app.store.engine import begin, database_now
from providers.base import ProviderError, Throttled
from providers.capabilities import BillLine, Bills

log = structlog.get_logger()

BEFORE = timedelta(hours=1)
_HOUR = Decimal(3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Works on one account at a time. ``settle_s``: how long after its end a run's bill is whole."""

    engine: AsyncEngine
    installation: str
    settle_s: float

    async def account(self, account: Account, *, epoch: int) -> None:
        """Fetch what is new of one account's bill, and compare what is whole.

        Raises:
            StoreUnavailable: the next round fetches and compares it.
        """
        provider = account.provider
        if not isinstance(provider, Bills):
            return
        async with begin(self.engine) as conn:
            since = await bills.open_from(conn, provider=account.name, account=account.account)
            now = await database_now(conn)
        window = (min(since or now, now - timedelta(seconds=self.settle_s)) - BEFORE, now + BEFORE)
        await account.budget.take(Urgency.LIST)
        try:
            lines = await provider.bill(since=window[0], until=window[1])
        except Throttled as error:
            account.budget.pause(error.retry_after_s)
            return
        except ProviderError as error:
            log.info("bill not fetched", provider=account.name, account=account.account, error=str(error))
            return
        async with begin(self.engine) as conn:
            kept = [self._line(each) for each in lines]
            names = {"provider": account.name, "account": account.account}
            await bills.put(conn, kept, epoch=epoch, **names)
            await bills.fetched(conn, epoch=epoch, **names)
            for compared in await bills.comparable(conn, settle_s=self.settle_s, **names):
                difference = difference_of(compared)
                if difference is not None:
                    log.info("bill differs", run=compared.run_id, dollar_seconds=str(difference))
                await bills.settle(conn, compared, difference=difference, epoch=epoch)
            await bills.price(conn, epoch=epoch, **names)
            for key in await bills.strays(conn, settle_s=self.settle_s, epoch=epoch, **names):
                log.warning("billed for a machine that we never saw", key=key)

    def _line(self, each: BillLine) -> bills.Line:
        identity = parse(each.identity)
        ours = identity is not None and identity.installation == self.installation
        return bills.Line(
            resource_id=each.resource_id or "",
            meter=each.kind.value if each.kind is not None else "",
            starts_at=each.start,
            ends_at=each.end,
            usd=each.usd,
            identity=each.identity,
            claim_uid=identity.claim_uid if identity is not None and ours else None,
            final=each.final,
        )


def difference_of(compared: bills.Compared) -> Decimal | None:
    """Dollar-seconds that the bill says more than the ledger; None within what its rounding explains."""
    billed = product(total(list(compared.lines)), _HOUR)
    difference = total([billed, -compared.dollar_seconds])
    explained = product(total([_half_step(line) for line in compared.lines]), _HOUR)
    return None if abs(difference) <= explained else difference


def _half_step(amount: Decimal) -> Decimal:
    """Half of the last digit that a bill's line has: 0.0005 for three decimals."""
    exponent = amount.as_tuple().exponent
    assert isinstance(exponent, int)  # amounts are finite: they came out of a numeric
    return Decimal(5).scaleb(exponent - 1)
