"""Events: what ``kubectl describe`` shows people. Best effort, in the background, and never a flood.

Equal events of one object become one with a count; many unequal ones of one reason become one whose
message changes; each object has a token bucket for new ones, and all of type Normal share one, so that a
burst of Pods that fare well spends its writes on them; the queue is bounded and drops its oldest. A caller
never waits and never sees an error. Texts must be safe to show: nothing is masked here.
"""

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

import structlog

from app.kube import paths
from app.kube.bucket import TokenBucket
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.patches import timestamp

log = structlog.get_logger()

CONTROLLER = "nebula.inftyai.com/controller"
SAME_FOR_S = 600.0  # an equal event within this time counts up; later it is a new one
REPEAT_S = 30.0  # a count is written at most this often
VARIANTS = 8  # different messages of one reason and object; the next ones share an event
MESSAGE_CHARS = 1000  # the API takes 1,024 bytes in events.k8s.io, which reads the same objects
QUEUE = 1000
REMEMBERED = 4096
BURST, PER_S = 20, 1 / 60  # new events of one object
NORMAL_BURST, NORMAL_PER_S = 100, 5.0  # new events of type Normal, of all objects


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """Whom an event is about. ``namespace`` is empty for cluster-scoped kinds."""

    api_version: str
    kind: str
    namespace: str = ""
    name: str
    uid: str

    @classmethod
    def of(cls, obj: Obj) -> "ObjectRef":
        metadata = obj["metadata"]
        return cls(
            api_version=obj["apiVersion"],
            kind=obj["kind"],
            namespace=metadata.get("namespace", ""),
            name=metadata["name"],
            uid=metadata["uid"],
        )


_Key = tuple[str, str, str, str]  # uid, type, reason, message (empty: the shared one)


@dataclass(slots=True)
class _Entry:
    """One Event object, as it should be on the server."""

    ref: ObjectRef
    type: str
    reason: str
    message: str
    first: datetime
    last: datetime
    last_at: float
    count: int = 1
    name: str = ""  # on the server; empty until created
    written_at: float = float("-inf")
    timer: asyncio.TimerHandle | None = None  # set while it waits to be written again


@dataclass(slots=True)
class _Object:
    """What is remembered of one object's events."""

    bucket: TokenBucket
    variants: dict[tuple[str, str], set[str]] = field(default_factory=dict)


class Recorder:
    """Collects with `note`, writes in `run`."""

    def __init__(
        self,
        kube: Kube,
        *,
        component: str = "nebula",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        repeat_s: float = REPEAT_S,
        burst: int = BURST,
        normal_burst: int = NORMAL_BURST,
        queue: int = QUEUE,
    ) -> None:
        self.dropped = 0  # for want of tokens or room
        self.written = 0
        self._kube = kube
        self._component, self._instance = component, socket.gethostname()
        self._clock, self._now = clock, now
        self._repeat_s, self._burst, self._limit = repeat_s, burst, queue
        self._normal = TokenBucket(per_s=NORMAL_PER_S, burst=normal_burst, now=clock)
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._objects: OrderedDict[str, _Object] = OrderedDict()
        self._queue: OrderedDict[_Key, _Entry] = OrderedDict()
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def note(
        self, about: ObjectRef | Obj, *, type: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Tell about an object (or a reference to one): ``reason`` in CamelCase, ``message`` for people."""
        ref = about if isinstance(about, ObjectRef) else ObjectRef.of(about)
        message = message[:MESSAGE_CHARS]
        known = self._known(ref)
        variants = known.variants.setdefault((type, reason), set())
        if message not in variants:
            if len(variants) < VARIANTS:
                variants.add(message)
            else:
                self._note(known, ref, type=type, reason=reason, shown=f"(and similar) {message}", variant="")
                return
        self._note(known, ref, type=type, reason=reason, shown=message, variant=message)

    async def run(self) -> None:
        """Write what is noted, until cancelled."""
        while True:
            await self._filled.wait()
            key, entry = self._queue.popitem(last=False)
            if not self._queue:
                self._filled.clear()
            wait_s = entry.written_at + self._repeat_s - self._clock()
            if wait_s > 0:
                entry.timer = asyncio.get_running_loop().call_later(wait_s, self._due, key, entry)
            else:
                await self._write(entry)
            if not self._queue:
                self._idle.set()

    async def flush(self, *, within_s: float = 2.0) -> None:
        """Wait until what is due has been written, at most ``within_s``; `run` must be running."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.info("events left unwritten", events=len(self._queue))

    def _note(
        self, known: _Object, ref: ObjectRef, *, type: str, reason: str, shown: str, variant: str
    ) -> None:
        key = (ref.uid, type, reason, variant)
        at, now = self._clock(), self._now()
        entry = self._entries.get(key)
        if entry and at - entry.last_at < SAME_FOR_S:
            entry.count += 1
            entry.last, entry.last_at, entry.message = now, at, shown
        elif (type != "Normal" or self._normal.take()) and known.bucket.take():
            entry = _Entry(ref=ref, type=type, reason=reason, message=shown, first=now, last=now, last_at=at)
            self._entries[key] = entry
            while len(self._entries) > REMEMBERED:
                self._entries.popitem(last=False)
        else:
            self.dropped += 1
            return
        self._entries.move_to_end(key)
        self._enqueue(key, entry)

    def _known(self, ref: ObjectRef) -> _Object:
        known = self._objects.get(ref.uid)
        if known is None:
            known = _Object(TokenBucket(per_s=PER_S, burst=self._burst, now=self._clock))
            self._objects[ref.uid] = known
            while len(self._objects) > REMEMBERED:
                self._objects.popitem(last=False)
        self._objects.move_to_end(ref.uid)
        return known

    def _due(self, key: _Key, entry: _Entry) -> None:
        entry.timer = None
        self._enqueue(key, entry)

    def _enqueue(self, key: _Key, entry: _Entry) -> None:
        if entry.timer:
            return
        self._queue[key] = entry
        while len(self._queue) > self._limit:
            self._queue.popitem(last=False)
            self.dropped += 1
        self._filled.set()
        self._idle.clear()

    async def _write(self, entry: _Entry) -> None:
        entry.written_at = self._clock()
        try:
            if entry.name:
                await self._count_up(entry)
            else:
                await self._create(entry)
            self.written += 1
        except KubeError as error:  # a namespace that is going away, a server that is: events are no duty
            log.debug("event not written", reason=entry.reason, error=str(error))
            self.dropped += 1
        except Exception:
            log.exception("event not written", reason=entry.reason)
            self.dropped += 1

    async def _count_up(self, entry: _Entry) -> None:
        changes = {"count": entry.count, "lastTimestamp": timestamp(entry.last), "message": entry.message}
        try:
            path = paths.event(_namespace(entry.ref), entry.name)
            await self._kube.patch(path, changes, kind="merge", metadata_only=True)
        except Replaced:  # the server forgets events after an hour
            await self._create(entry)

    async def _create(self, entry: _Entry) -> None:
        ref, name = entry.ref, f"{entry.ref.name[:200]}.{uuid4().hex[:16]}"
        involved = {"apiVersion": ref.api_version, "kind": ref.kind, "name": ref.name, "uid": ref.uid}
        if ref.namespace:
            involved["namespace"] = ref.namespace
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": _namespace(ref)},
            "involvedObject": involved,
            "type": entry.type,
            "reason": entry.reason,
            "message": entry.message,
            "count": entry.count,
            "firstTimestamp": timestamp(entry.first),
            "lastTimestamp": timestamp(entry.last),
            "source": {"component": self._component},
            "reportingComponent": CONTROLLER,
            "reportingInstance": self._instance[:128],
        }
        await self._kube.create(paths.events(_namespace(ref)), event, metadata_only=True)
        entry.name = name


def _namespace(ref: ObjectRef) -> str:
    return ref.namespace or "default"  # where the API server wants events of cluster-scoped objects
