"""The claims of Pods as placement must see them: what the watch shows, and our own that it does not show yet.

Beside them stands what they take from pools' limits. It is written with the decision, before the claim; it
follows the claims that there are, and what was promised for a claim that was not made is given back.
"""

from contextlib import suppress

import structlog

from app.kube import paths
from app.kube.cache import Cache
from app.kube.client import Kube, Obj
from app.kube.errors import Replaced
from app.placement import objects
from app.placement.desk import Desk
from app.placement.objects import age, phase_of, pod_of, uid_of
from app.placement.waiting import Key
from app.store.reservations import Reservation

log = structlog.get_logger()

_BY_UID, _BY_POD = "placement-pod-uid", "placement-pod"


class ClaimBook:
    """Made with the controller; `begin` starts each term."""

    def __init__(self, *, kube: Kube, claims: Cache, desk: Desk) -> None:
        self._kube, self._claims, self._desk = kube, claims, desk
        self._made: dict[Key, Obj] = {}  # claims that the watch has not shown yet
        self._promised: dict[Key, Reservation] = {}  # for claims that the watch has not shown yet
        claims.add_index(_BY_UID, lambda claim: [claim["spec"]["podRef"]["uid"]])
        claims.add_index(_BY_POD, lambda claim: ["/".join(pod_of(claim))])

    def begin(self) -> None:
        """Forget what an earlier term made; the claims that there are now are all there is."""
        self._made.clear()
        self._promised.clear()
        self.restore()

    def restore(self) -> None:
        """What is taken from limits is what the claims take that there are, and those about to be made."""
        found = [objects.reservation_of(claim) for claim in self._claims]
        taken = {row.key: row for row in (*self._promised.values(), *found)}
        self._desk.claims_are(taken.values())

    # --- whose claims there are -------------------------------------------------------------------

    def shown(self, pod: Obj) -> list[Obj]:
        """The claims of this very Pod that the watch shows."""
        return self._claims.by_index(_BY_UID, uid_of(pod))

    async def own(self, key: Key, pod: Obj) -> list[Obj]:
        """The claims of this very Pod, oldest first."""
        own = sorted(self.shown(pod), key=age)
        made = self._made.get(key)
        if made is None or any(uid_of(claim) == uid_of(made) for claim in own):
            return own
        living = await self._kube.find(paths.nodeclaim(made["metadata"]["name"]))
        if living is None or living["spec"]["podRef"]["uid"] != uid_of(pod):
            self._made.pop(key, None)
            return own
        return [*own, living]

    def others(self, key: Key, pod: Obj) -> list[Obj]:
        """Claims of this namespace and name that are not of this very Pod."""
        found = self._claims.by_index(_BY_POD, "/".join(key))
        return [claim for claim in found if claim["spec"]["podRef"]["uid"] != uid_of(pod)]

    def has_name(self, name: str) -> bool:
        """Whether a claim of this name is shown."""
        return self._claims.get("", name) is not None

    def remember(self, key: Key, claim: Obj) -> None:
        """The claim exists, whether or not the watch has shown it."""
        if self._claims.by_uid(uid_of(claim)) is None:
            self._made[key] = claim

    def forget(self, key: Key) -> None:
        """The Pod is gone, or on its way."""
        self._made.pop(key, None)

    async def delete(self, claim: Obj, *, why: str) -> None:
        """Give a claim up; one that is gone already is what we want."""
        log.warning("claim given up", claim=claim["metadata"]["name"], claim_uid=uid_of(claim), why=why)
        with suppress(Replaced):
            await self._kube.delete(paths.nodeclaim(claim["metadata"]["name"]), uid=uid_of(claim))

    # --- what they take from limits -----------------------------------------------------------------

    def promise(self, key: Key, taken: Reservation) -> None:
        """A decision that is about to be committed takes this for a claim of its own."""
        self._promised[key] = taken

    def take_back(self, key: Key) -> str | None:
        """Give back what was promised for a claim that was not made, as far as we know; the pool it was of.

        If it was made, the watch shows it, and then it counts.
        """
        promised = self._promised.pop(key, None)
        if promised is None or key in self._made:
            return None
        self._desk.claim_ended(promised.key)
        return promised.pool

    def give_back(self, claim: Obj) -> None:
        """The claim takes nothing any more, though it is still there."""
        self._desk.claim_ended(objects.reservation_of(claim).key)

    def follow(self, key: Key, old: Obj | None, new: Obj | None) -> bool:
        """The watch has shown a change of a claim. True: its pool may have more room than before."""
        same = old is not None and new is not None and uid_of(old) == uid_of(new)
        if old is not None and not same:
            self._desk.claim_ended(objects.reservation_of(old).key)
        if new is not None and not same:
            found = objects.reservation_of(new)
            promised = self._promised.get(key)
            if promised is not None and promised.key == found.key:
                del self._promised[key]
            if promised is None or not objects.is_promised(found, promised):
                self._desk.claim_found(found)
        return old is not None and not (same and new is not None and phase_of(old) == phase_of(new))

    def seen(self, key: Key, claim: Obj) -> None:
        """The watch shows this claim, or its end: nothing need be remembered of it."""
        if (made := self._made.get(key)) and uid_of(made) == uid_of(claim):
            del self._made[key]
