"""The pure ranking, handed what the replica sees at this moment: offers, nodes and prices."""

from collections.abc import Sequence
from datetime import datetime

from app.api import keys
from app.api.nodepool import NodePool
from app.kube.cache import Cache
from app.placement.constraints import NodeView, node_view
from app.placement.market import Market
from app.placement.objects import leaving
from app.placement.rank import History, Place, Usage, rank
from app.placement.request import PlacementRequest
from app.store.blocks import Block
from catalog.offerings import AccountKey, Offerings


class Ranking:
    """One a replica's placement."""

    def __init__(self, *, offerings: Offerings, nodes: Cache, market: Market) -> None:
        self._offerings, self._nodes, self._market = offerings, nodes, market

    def places(
        self,
        request: PlacementRequest,
        pool: NodePool,
        *,
        blocks: Sequence[Block],
        usage: Usage,
        history: History,
        now: datetime,
    ) -> list[Place]:
        """See `rank`."""
        return rank(
            request,
            pool=pool.spec,
            offerings=self._offerings.view,
            nodes=self._node_views(pool),
            blocks=blocks,
            usage=usage,
            history=history,
            now=now,
            market=self._market,
        )

    def _node_views(self, pool: NodePool) -> dict[AccountKey, NodeView]:
        views = {}
        for entry in pool.spec.providers:
            key = (entry.name, entry.account)
            if key not in self._offerings.view:
                continue
            node = self._nodes.get("", keys.node_name(*key))
            if node is not None and not leaving(node):
                views[key] = node_view(node)
        return views
