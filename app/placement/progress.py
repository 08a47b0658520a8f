"""What a Pod is told while a machine is rented for it: where, what it waits for, and not too often."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from app.api.reasons import PlacedReason
from app.kube.client import Obj
from app.kube.errors import KubeError
from app.placement.courses import Course
from app.placement.telling import Teller
from app.placement.waiting import Key
from app.provisioning.model import ClaimSpec

log = structlog.get_logger()

QUIET_S = 1.0  # a candidate that is decided sooner is not worth a write on the Pod
TRYING_S = 5.0  # nor is a Pod that goes from one to the next, for so long
TEXT_S = 30.0  # how often the words about one candidate may change


class Progress:
    """``clock`` is monotonic, as the moments of a course are."""

    def __init__(self, *, teller: Teller, clock: Callable[[], float]) -> None:
        self._teller, self._clock = teller, clock

    async def waits_for_gates(self, key: Key, pod: Obj, others: Sequence[str]) -> None:
        """Nothing is rented for a Pod that somebody else still holds back."""
        message = f"waiting for other scheduling gates to go first: {', '.join(others)}"
        await self._teller.say(key, pod, placed=False, reason=PlacedReason.OTHER_GATES, message=message)

    async def cannot_be_read(self, key: Key, pod: Obj, why: str) -> None:
        """Its claim is of another version, or broken."""
        await self._teller.say(key, pod, placed=False, reason=PlacedReason.STALE_CLAIM, message=why)

    async def lacks(self, key: Key, pod: Obj, why: str) -> None:
        """Something that the Pod refers to is not there: nothing can be asked for."""
        await self._teller.say(key, pod, placed=False, reason=PlacedReason.CONFIG_ERROR, message=why)

    async def is_slow(self, key: Key, pod: Obj, course: Course, spec: ClaimSpec) -> None:
        """Tell where the machine is asked for, once that has taken longer than a moment."""
        await asyncio.sleep(self.quiet_left_s(course))
        try:
            await self.rents(key, pod, course, spec, "")
        except KubeError as error:
            log.info("not told", error=str(error))

    async def tries_long(self, key: Key, pod: Obj, course: Course, spec: ClaimSpec) -> None:
        """The Pod has heard nothing for long, although each candidate was decided in a moment."""
        since = max(course.trying_since or self._clock(), course.said_at)
        if self._clock() - since >= TRYING_S:
            message = f"renting at {spec.place}, candidate {max(1, course.tried)} that is tried"
            await self._say(key, pod, course, about="trying", message=message)

    async def rents(self, key: Key, pod: Obj, course: Course, spec: ClaimSpec, more: str) -> None:
        """How it stands with one candidate; ``more`` begins with a colon, or is empty."""
        if not self.quiet_left_s(course):
            about = f"{spec.uid}{more.partition(': ')[2].partition(':')[0]}"
            await self._say(key, pod, course, about=about, message=f"renting at {spec.place}{more}")

    async def calls_off(self, key: Key, pod: Obj, course: Course, text: str) -> None:
        """What the next candidate waits for."""
        if not self.quiet_left_s(course):
            message = f"calling off the order at {text}"
            await self._say(key, pod, course, about="release", message=message)

    def quiet_left_s(self, course: Course) -> float:
        """How long nothing need be told yet."""
        return max(0.0, course.began + QUIET_S - self._clock())

    async def _say(self, key: Key, pod: Obj, course: Course, *, about: str, message: str) -> None:
        """Say it unless the same thing was said in other words a moment ago."""
        if course.said_of == about and self._clock() - course.said_at < TEXT_S:
            return
        await self._teller.say(key, pod, placed=False, reason=PlacedReason.RENTING, message=message)
        course.said_of, course.said_at = about, self._clock()
