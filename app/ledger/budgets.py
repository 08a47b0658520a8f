"""What budgets do beside refusing, which is placement's: NodePools' budgets become rows, thresholds are told
of once a period, and a budget that drains ends the machines of its scope once it is spent.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.nodepool import Budget as PoolBudget
from app.api.nodepool import BudgetAction
from app.api.quantities import usd
from app.api.reasons import PoolEvent
from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.events import Recorder
from app.store import budgets
from app.store.budgets import POOL_PREFIX, Budget, Status
from app.store.engine import begin
from app.workload.owners import labels_said, team_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """One a term. ``look_ahead_s`` is that of NodePools' budgets."""

    engine: AsyncEngine
    kube: Kube
    pools: Cache
    claims: Cache
    events: Recorder
    look_ahead_s: float

    async def look(self, *, epoch: int) -> None:
        """Bring the rows up to the NodePools, tell of what was passed, drain what is spent.

        Raises:
            StoreUnavailable: the next look does it.
        """
        wanted = [own for pool in self.pools.all() if (own := self._of(pool)) is not None]
        async with begin(self.engine) as conn:
            await budgets.put(conn, wanted, epoch=epoch)
            await budgets.keep_pools(conn, [own.name for own in wanted], epoch=epoch)
            found = await budgets.status(conn)
            told = [
                (each, threshold)
                for each in found
                for threshold in budgets.passed(each)
                if await budgets.tell(conn, each, threshold, epoch=epoch)
            ]
        for each, threshold in told:
            self._tell(each, threshold)
        for each in found:
            if each.action == BudgetAction.DRAIN.value and each.spent_usd >= each.amount_usd:
                await self._drain(each)

    def _of(self, pool: Obj) -> Budget | None:
        spec = (pool.get("spec") or {}).get("budget")
        if spec is None or "deletionTimestamp" in pool["metadata"]:
            return None
        name = pool["metadata"]["name"]
        try:
            asked = PoolBudget.model_validate(spec)
        except ValidationError as error:
            log.warning("a NodePool's budget cannot be read", pool=name, error=str(error)[:256])
            return None
        return Budget(
            name=f"{POOL_PREFIX}{name}",
            pool=name,
            amount_usd=asked.amount,
            period=asked.period,
            thresholds=asked.thresholds,
            action=asked.action.value,
            look_ahead_s=int(self.look_ahead_s),
            set_by="NodePool",
        )

    def _tell(self, each: Status, threshold: int) -> None:
        said = (
            f"{threshold}% of budget {each.name} is spent: {usd(each.spent_usd)} of {usd(each.amount_usd)}"
            f" this {each.period}, {usd(each.usd_per_hour)} an hour runs"
        )
        log.warning("budget threshold", budget=each.name, threshold=threshold, action=each.action)
        pool = self.pools.get("", each.pool) if each.pool else None
        if pool is not None:
            self.events.note(pool, type="Warning", reason=PoolEvent.BUDGET_THRESHOLD, message=said)

    async def _drain(self, each: Status) -> None:
        for claim in claims_of(each, self.claims.all()):
            name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
            log.warning("budget drains", budget=each.name, claim=name)
            try:
                await self.kube.delete(paths.nodeclaim(name), uid=uid)
            except Replaced:
                continue
            except KubeError as error:
                log.info("not drained yet", claim=name, error=str(error))


def claims_of(each: Status, claims: Iterable[Obj]) -> Iterable[Obj]:
    """Those of a budget's scope that stay; whose they are is frozen on them. Pure."""
    for claim in claims:
        spec, labels = claim["spec"], labels_said(claim["metadata"])
        if "deletionTimestamp" not in claim["metadata"] and budgets.concerns(
            each,
            namespace=spec["podRef"]["namespace"],
            team=team_of(labels),
            pool=spec.get("poolRef") or "",
            labels=labels,
        ):
            yield claim
