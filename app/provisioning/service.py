"""Provisioning as its callers see it: ``ensure``, ``release``, and a view of what is known.

Both calls may be made at any time, any number of times, and interleave; neither raises for anything that a
cloud, the store or the API server does.
"""

import asyncio
import time
from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.accounts import Accounts
from app.inventory.identity import Identity
from app.inventory.records import Recorder
from app.inventory.rounds import AccountKey, Inventory
from app.provisioning.core import Core
from app.provisioning.follow import Follower
from app.provisioning.keep import Keeper
from app.provisioning.model import ClaimPort, ClaimSpec, Leadership, Outcome, Policy, Release, View
from app.provisioning.release import Releaser
from app.provisioning.rent import Renter
from app.settings import Settings
from catalog.offerings import Offerings
from providers.base import ClaimUid, Ref, Workload


class Provisioning:
    """One a replica; works while ``leadership`` is valid. ``port`` is the way to claims nobody asks for."""

    def __init__(
        self,
        *,
        accounts: Accounts,
        offerings: Offerings,
        engine: AsyncEngine,
        settings: Settings,
        installation: str,
        leadership: Leadership,
        port: ClaimPort,
        shown: Callable[[ClaimUid], bool] = lambda _uid: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown``: whether the caller's watch has the claim; one that it has not is asked for live."""
        self.inventory = Inventory(
            accounts=accounts,
            installation=installation,
            settings=settings,
            scope=self._scope,
            recorded_account=lambda key: self._core.recorded_account(key),
            prepare=lambda account: self._follower.prepare(account),
            clock=clock,
        )
        self._core = Core(
            accounts=accounts,
            inventory=self.inventory,
            offerings=offerings,
            engine=engine,
            settings=settings,
            installation=installation,
            leadership=leadership,
            clock=clock,
            shown=shown,
        )
        self._renter, self._releaser = Renter(self._core), Releaser(self._core)
        self._recorder = Recorder(self.inventory, engine=engine, installation=installation)
        self.keep = Keeper(self._core)
        self._follower = Follower(
            self._core, port=port, release=self._releaser.release, reread=self._recorder.again
        )

    def on_change(self, listener: Callable[[ClaimUid], None]) -> None:
        """Call ``listener`` when a view may differ or a waiting call is worth repeating. Must not block."""
        self._core.listeners.append(listener)

    def view(self, uid: ClaimUid) -> View:
        life = self._core.lives.get(uid)
        return life.view() if life is not None else View()

    async def ensure(
        self, claim: ClaimSpec, workload: Workload | None, *, port: ClaimPort, policy: Policy
    ) -> Outcome:
        """Rent one machine for the claim unless it ever had one. See `app.provisioning.rent`.

        Without a workload nothing is sent; what earlier calls have sent is found, or settled, all the same.
        """
        return await self._renter.ensure(claim, workload, port=port, policy=policy)

    async def release(self, claim: ClaimSpec, *, port: ClaimPort, reason: str) -> Release:
        """End everything the claim has or may have. See `app.provisioning.release`."""
        return await self._releaser.release(claim, port=port, reason=reason)

    async def end_forgotten(self, ref: Ref, identity: Identity, *, reason: str) -> str:
        """Begin the end of a machine that no claim and no row knows. See `app.provisioning.follow`."""
        return await self._follower.end_forgotten(ref, identity, reason=reason)

    def adopt_status(self, claim: ClaimSpec) -> None:
        """Follow the machine that a claim's status names, where no row has told of it (no store yet)."""
        life = self._core.life(claim)
        if life.state is None and life.ref is None and claim.instance is not None:
            life.hint = claim.instance
            known = self.inventory.known(claim.instance)
            if known is not None and known.identity.claim_uid == claim.uid:
                life.machine = known.machine

    def note_mark(self, sequence: int) -> None:
        """A claim carries this mark: the next sequence numbers are above it, whatever the rows say."""
        self._core.highest_mark = max(self._core.highest_mark, sequence)

    def forget(self, uid: ClaimUid) -> None:
        """The claim object is gone and its rental ended: nothing will ask again."""
        life = self._core.lives.get(uid)
        if life is not None and life.state == "ended":
            self._core.lives.pop(uid, None)
            self._core.written.pop(uid, None)

    async def run(self) -> None:
        """Poll the clouds and follow what they show, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.inventory.run(), name="inventory")
            tasks.create_task(self._recorder.run(), name="inventory-rows")
            tasks.create_task(self._follower.run(), name="follow")
            tasks.create_task(self.keep.run(), name="keep")

    def _scope(self, key: AccountKey) -> set[str]:
        """Every region that a pool may place into, or that a rental is or was ever in."""
        offers = self._core.offerings.get(*key)
        was_in = self._core.past_regions.setdefault(key, set())
        for life in self._core.lives.values():
            if life.key == key:
                was_in.add(life.claim.region)
                if life.ref is not None:
                    was_in.add(life.ref.region)
        return was_in.union(offers.regions if offers else ())
