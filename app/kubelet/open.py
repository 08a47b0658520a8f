"""The sessions that are open: an end is put to those whose Pod, client or time is over."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from app.kube import paths
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.kubelet.find import Target
from app.kubelet.peers import Peer

log = structlog.get_logger()
SWEEP_S = 5.0
LOOK_AT_PODS_S = 30.0


@dataclass(slots=True, eq=False)
class Open:
    """One session. ``ended`` is set by whoever ends it, with the reason; ``peer`` None for output."""

    target: Target
    ended: "asyncio.Future[str]"
    peer: Peer | None = None
    since: float = field(default_factory=time.monotonic)

    def end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


class Sessions:
    """All of one replica."""

    def __init__(self, kube: Kube, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._idle_s, self._clock = kube.room("kubelet"), idle_s, clock
        self._open: set[Open] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def kept(
        self, target: Target, *, peer: Peer | None = None, ended: "asyncio.Future[str] | None" = None
    ) -> Iterator[Open]:
        """One session, for as long as the block lasts."""
        session = Open(target, ended or asyncio.get_running_loop().create_future(), peer)
        self._open.add(session)
        try:
            yield session
        finally:
            self._open.discard(session)

    def end_all(self, why: str) -> None:
        for session in list(self._open):
            session.end(why)

    async def run(self) -> None:
        """Look after them, for ever."""
        looked_at = self._clock()
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()
            if self._open and self._clock() - looked_at >= LOOK_AT_PODS_S:
                looked_at = self._clock()
                await self._look_at_pods()

    def _sweep(self) -> None:
        now = self._clock()
        for session in list(self._open):
            peer = session.peer
            if peer is None:
                continue
            if peer.abandoned():
                peer.abort()
            elif now - peer.active_at >= self._idle_s:
                session.end("nothing was heard of the client for too long")

    async def _look_at_pods(self) -> None:
        """A Pod that is gone, or another by now, has no sessions: its machine may be slow to notice."""
        by_pod: dict[str, list[Open]] = {}
        for session in self._open:
            by_pod.setdefault(session.target.uid, []).append(session)
        for uid, sessions in by_pod.items():
            metadata = sessions[0].target.pod["metadata"]
            try:
                path = paths.pod(metadata["namespace"], metadata["name"])
                pod = await self._kube.find(path)
            except KubeError as error:
                log.debug("pod not looked at", error=str(error))
                continue
            if pod is None or pod["metadata"]["uid"] != uid:
                for session in sessions:
                    session.end("the pod is gone")
