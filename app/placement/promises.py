"""What pools hold and what is promised from them, while one transaction of the desk is open.

The sums come from the rows and so include claims that no watch has shown yet; what is promised in this
transaction is added at once, so that the next decision of the same batch sees it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from app.placement.rank import Usage
from app.store.budgets import Standing
from app.store.reservations import Reservation, Sum


class Promises:
    """Reservations of one transaction. ``rows`` are to be written before it ends."""

    def __init__(self, sums: Iterable[Sum] = (), budgets: Iterable[Standing] = ()) -> None:
        self._budgets = list(budgets)
        self._usage: dict[str, Usage] = defaultdict(Usage)
        self.rows: list[Reservation] = []
        for each in sums:
            self._usage[each.pool] = self._usage[each.pool].plus(
                (each.provider, each.account),
                machines=each.machines,
                gpus=each.gpus,
                usd_per_hour=each.usd_per_hour,
                unpriced=each.unpriced,
            )

    def usage(
        self, pool: str, *, namespace: str = "", team: str = "", labels: Mapping[str, str] | None = None
    ) -> Usage:
        """What the pool holds, this transaction's promises included. Known of pools that were asked for.

        With it the budgets that a machine of these would be counted by.
        """
        scope = {"namespace": namespace, "team": team, "pool": pool}
        mine = [each for each in self._budgets if each.concerns(labels=labels or {}, **scope)]
        return replace(self._usage[pool], budgets=tuple(mine))

    def reserve(self, row: Reservation) -> None:
        """Promise this; it is committed together with the decision that it is part of, or not at all."""
        self.rows.append(row)
        self._usage[row.pool] = self._usage[row.pool].plus(
            (row.provider, row.account),
            machines=1,
            gpus=row.gpus,
            usd_per_hour=row.usd_per_hour,
            unpriced=int(row.usd_per_hour is None),
        )
        self._budgets = [
            replace(each, usd_per_hour=each.usd_per_hour + (row.usd_per_hour or 0))
            if each.concerns(namespace=row.namespace, team=row.team, pool=row.pool, labels=row.labels)
            else each
            for each in self._budgets
        ]
