"""A cloud account that others use as well: their machines must be there at the end of every schedule."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from app.inventory.identity import Identity, new_installation
from providers.base import ClaimUid
from tests.support.clouds import FakeCloud

LOOKS_LIKE_OURS = "nb-aaaaaaaaaa-train"


class SharedCloud(FakeCloud):
    """Three strangers have a machine each, which `truth` leaves out: what a test counts is ours."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._strangers: set[str] = set()

    async def reset(self, scenario: Mapping[str, Any]) -> None:
        self._strangers.clear()
        await super().reset(scenario)
        theirs = Identity(
            installation=new_installation(), claim_uid=ClaimUid(str(uuid4())), attempt=1, sequence=1
        )
        for name in ("by-hand", LOOKS_LIKE_OURS, str(theirs)):
            planted = await self.plant(name=name, accelerator="H100")
            self._strangers.add(str(planted["id"]))

    async def truth(self, *, name: str | None = None, image: str | None = None) -> dict[str, Any]:
        told = await super().truth(name=name, image=image)
        return told | {"machines": [one for one in told["machines"] if one["id"] not in self._strangers]}

    async def check_strangers(self) -> None:
        """Nobody has touched them: none is over, and none was ever asked to be."""
        told = await super().truth()
        there = {one["id"]: one for one in told["machines"]}
        for each in self._strangers:
            one = there[each]
            assert (one["state"], one["terminates"], one["stops"]) == ("running", 0, 0), one
