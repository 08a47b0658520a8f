"""A live copy of one list: list it, watch it for ever, and tell handlers what has changed.

Invariants, whatever the network or the server does:

- The copy lags behind the server and never goes back in time; each change that it sees is reported once.
- An object that vanished while nobody watched is reported as deleted by the next list.
- One name with a new UID is a deletion and then an addition: two objects are never mixed.
- The loop ends only by cancellation; it never reconnects without a pause unless the last watch lived a while.

Being in the copy proves nothing about now, and a deletion may only mean that a label was taken off: before
anything that cannot be undone, ask the server, unless the last state could not be taken back. Objects are
shared, and parts of them between objects: nobody may change one.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import orjson
import structlog

from app.kube.client import PAGE, Kube, Obj
from app.kube.errors import Expired, KubeError, Unreachable, from_status
from app.kube.sharing import Shares

log = structlog.get_logger()

WATCH_S = 300  # how long the server is asked to keep one watch open
SILENCE_S = 80.0  # a watch this quiet is dead: the server sends a bookmark about once a minute
SETTLED_S = 5.0  # a watch that lived this long was a good one: reconnect without a pause
BASE_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STALE_AFTER = 4  # failures in a row from one version, after which it is not believed any more: list again

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped kinds) and name."""

Handler = Callable[[Obj | None, Obj | None], None]
"""Called with (None, new) for an addition, (old, new) for a change, (old, None) for a deletion."""


def key_of(obj: Obj) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Cache:
    """The objects below ``path`` that the selectors choose.

    ``trim`` may change an arriving object in place, to drop what nobody reads; ``managedFields`` are always
    dropped. Handlers and index functions run inside the watch: they must be quick and not wait.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
        trim: Callable[[Obj], None] | None = None,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        silence_s: float = SILENCE_S,
        base_delay_s: float = BASE_DELAY_S,
        max_delay_s: float = MAX_DELAY_S,
        settled_s: float = SETTLED_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.path = path
        self.lists = 0  # full lists completed
        self.watches = 0  # watches begun
        self._kube = kube
        self._selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._trim = trim
        self._page = page
        self._watch_s = watch_s
        self._silence_s = silence_s
        self._base_s, self._max_s, self._settled_s = base_delay_s, max_delay_s, settled_s
        self._sleep = sleep
        self._objects: dict[Key, Obj] = {}
        self._uids: dict[str, Obj] = {}
        self._indexes: dict[str, _Index] = {}
        self._handlers: list[Handler] = []
        self._synced = asyncio.Event()
        self._version = ""  # of the last thing seen; empty: list first
        self._kind: dict[str, str] = {}  # apiVersion and kind, which the items of a list lack
        self._heard_at = self._answered_at = time.monotonic()
        self._shares = Shares()

    def add_index(self, name: str, values: Callable[[Obj], Iterable[str]]) -> None:
        """Keep objects findable by each of ``values(obj)`` under ``by_index(name, value)``."""
        index = self._indexes[name] = _Index(values)
        for key, obj in self._objects.items():
            index.put(key, obj)

    def on_change(self, handler: Handler) -> None:
        """Call ``handler`` for each change from now on, and at once for each object that is already here."""
        self._handlers.append(handler)
        for obj in list(self._objects.values()):
            self._call(handler, None, obj)

    async def synced(self) -> None:
        """Wait until the first full list is in and every handler has seen it."""
        await self._synced.wait()

    @property
    def is_synced(self) -> bool:
        return self._synced.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard from the server: minutes mean that the copy is stale."""
        return time.monotonic() - self._heard_at

    @property
    def unanswered_s(self) -> float:
        """Seconds since the server said anything, be it no: minutes mean that there is no way to it."""
        return time.monotonic() - max(self._heard_at, self._answered_at)

    def get(self, namespace: str, name: str) -> Obj | None:
        return self._objects.get((namespace, name))

    def by_uid(self, uid: str) -> Obj | None:
        return self._uids.get(uid)

    def by_index(self, name: str, value: str) -> list[Obj]:
        """The objects with ``value`` in index ``name``, in order of arrival."""
        return [self._objects[key] for key in self._indexes[name].keys.get(value, ())]

    def all(self) -> list[Obj]:
        return list(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Obj]:
        return iter(self.all())

    async def run(self) -> None:
        """Follow the server until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            if not self._version:
                step, name = self._list, "list"
            else:
                step, name = self._watch, "watch"
            try:
                await step()
                error: KubeError | None = None
            except KubeError as refused:
                error = refused
                if not isinstance(refused, Unreachable):
                    self._answered_at = time.monotonic()
            except Exception:  # a bug here or a malformed answer must not end the watch for ever
                log.exception("cache step failed", path=self.path, step=name)
                error = KubeError(500, message="see the log")
            if error is None and name == "list":
                continue  # and watch from it at once
            if time.monotonic() - began >= self._settled_s:
                failures = 0
            else:
                failures += 1
            if error is not None:
                failures = self._judge(error, step=name, failures=failures)
            if failures:
                await self._sleep(self._delay_s(failures))

    def _judge(self, error: KubeError, *, step: str, failures: int) -> int:
        if isinstance(error, Expired):
            log.info("cache lists again", path=self.path, reason=error.message)
            self._version = ""
        elif isinstance(error, Unreachable) and not failures:
            log.debug("watch broke off", path=self.path, error=str(error))
        else:
            log.warning("cache step refused", path=self.path, step=step, error=str(error), failures=failures)
            if step == "watch" and not isinstance(error, Unreachable) and failures >= STALE_AFTER:
                self._version = ""
        return failures

    def _delay_s(self, failures: int) -> float:
        ceiling_s: float = min(self._max_s, self._base_s * 2 ** min(failures - 1, 16))
        return random.uniform(0.5, 1.0) * ceiling_s

    async def _list(self) -> None:
        gone = set(self._objects)
        version = ""
        async for page in self._kube.list_pages(self.path, limit=self._page, **self._selectors):
            self._heard_at = time.monotonic()
            version = page["metadata"]["resourceVersion"]
            self._kind = {"apiVersion": page["apiVersion"], "kind": page["kind"].removesuffix("List")}
            for obj in page["items"] or ():
                gone.discard(key_of(obj))
                self._put(self._arrived(obj))
        for key in gone:
            self._drop(key)
        self._version = version  # only now: half a list is no place to watch from
        self.lists += 1
        self._synced.set()

    async def _watch(self) -> None:
        query = {
            **self._selectors,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            # Spread, so that the watches of many caches do not all end together.
            "timeoutSeconds": max(1, round(self._watch_s * random.uniform(0.8, 1.0))),
        }
        self.watches += 1
        stream = self._kube.watch_lines(self.path, silence_s=self._silence_s, query=query)
        async with aclosing(stream):
            async for lines in stream:
                self._heard_at = time.monotonic()
                for line in lines:
                    if line:
                        self._take(orjson.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        obj: Obj = event["object"]
        match event["type"]:
            case "ADDED" | "MODIFIED":
                self._put(self._arrived(obj))
            case "DELETED":
                if (held := self._objects.get(key_of(obj))) and _uid(held) == _uid(obj):
                    self._drop(key_of(obj))
            case "BOOKMARK":
                pass
            case "ERROR":
                raise from_status(obj)
            case other:
                raise KubeError(500, message=f"a watch event of type {other!r}")
        self._version = obj["metadata"]["resourceVersion"]

    def _arrived(self, obj: Obj) -> Obj:
        obj["metadata"].pop("managedFields", None)
        if "kind" not in obj:
            obj.update(self._kind)
        if self._trim:
            self._trim(obj)
        self._shares.share(obj)
        return obj

    def _put(self, new: Obj) -> None:
        key = key_of(new)
        old = self._objects.get(key)
        if old is not None:
            if _uid(old) != _uid(new):
                self._drop(key)
                old = None
            elif old["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"]:
                return  # a list brings what the watch has already brought
        self._objects[key] = self._uids[_uid(new)] = new
        for index in self._indexes.values():
            index.put(key, new)
        self._changed(old, new)

    def _drop(self, key: Key) -> None:
        old = self._objects.pop(key)
        self._uids.pop(_uid(old), None)
        for index in self._indexes.values():
            index.drop(key)
        self._changed(old, None)

    def _changed(self, old: Obj | None, new: Obj | None) -> None:
        for handler in self._handlers:
            self._call(handler, old, new)

    def _call(self, handler: Handler, old: Obj | None, new: Obj | None) -> None:
        try:
            handler(old, new)
        except Exception:
            log.exception("change handler failed", path=self.path, object=key_of(new or old or {}))


class _Index:
    """Value to keys. Keys are kept in a dict for its order; the objects themselves stay in one place."""

    def __init__(self, values: Callable[[Obj], Iterable[str]]) -> None:
        self._values = values
        self._of: dict[Key, tuple[str, ...]] = {}
        self.keys: dict[str, dict[Key, None]] = {}

    def put(self, key: Key, obj: Obj) -> None:
        try:
            values = tuple(self._values(obj))
        except Exception:
            log.exception("index function failed", object=key)
            values = ()
        if values == self._of.get(key):
            return
        self.drop(key)
        if values:
            self._of[key] = values
            for value in values:
                self.keys.setdefault(value, {})[key] = None

    def drop(self, key: Key) -> None:
        for value in self._of.pop(key, ()):
            keys = self.keys[value]
            keys.pop(key, None)  # an index function may name a value twice
            if not keys:
                del self.keys[value]


def _uid(obj: Obj) -> str:
    uid: str = obj["metadata"]["uid"]
    return uid
