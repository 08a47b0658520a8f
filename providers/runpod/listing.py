"""The one list that everything is learnt from, and what a list alone does not tell.

A list costs one request in quiet times. More are asked for only when there is something to learn: that the
answer is our account's (when a pod that was there is missing, or ten minutes after the last proof), why a pod
is over, and what a host says of a pod that does not come up. What is remembered here only saves requests.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from providers.base import End, Machine, ProviderError, Round, Unavailable
from providers.capabilities import Balance
from providers.runpod.calls import Garbled, parsed, read
from providers.runpod.client import NoAnswer, NotSent, RunPodClient
from providers.runpod.logs import reported_end, system_lines
from providers.runpod.machines import end_of, is_over, state_of
from providers.runpod.parts import Parts
from providers.runpod.wire import JOB_VARIABLE, Pod, PodPage

_PAGE = 1000
_PROVE_EVERY_S = 600.0
_PROOFS = 3  # lists in a row, once a pod is missing
_ENDS_A_ROUND = 5
_ASKS_FOR_AN_END = 3
_LOOKS_A_ROUND = 2
_JOBS_A_ROUND = 5
_LOOK_EVERY_S = 30.0  # at the system log of a pod that does not come up
_LOOPING = 3  # restarts of a container that are no accident
_PULL_FAILED = ("error pulling image", "pull access denied", "manifest unknown", "failed to pull")
_REASON = "query reason($id: String!) { pod(input: {podId: $id}) { lastStatusChange } }"
_BALANCE = "query balance { myself { clientBalance currentSpendPerHr spendLimit } }"


@dataclass(slots=True)
class _Boot:
    """A pod that does not run yet. Moments are monotonic seconds."""

    since: float
    looked_at: float | None = None
    failing_since: float | None = None
    said: str = ""


@dataclass(slots=True)
class _Life:
    """How often the container of a running pod was seen to begin again."""

    uptime: float
    restarts: int = 0


@dataclass(slots=True)
class _Job:
    """A command that reports its end, since its container's last start."""

    started_at: datetime | None
    looked_at: float | None
    end: End | None = None


class Listing:
    """Of one account."""

    def __init__(
        self,
        client: RunPodClient,
        *,
        parts: Parts,
        pull_window_s: float,
        job_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._parts, self._clock = client, parts, clock
        self._pull_window_s, self._job_every_s = pull_window_s, job_every_s
        self._look_after_s = min(_LOOK_EVERY_S, pull_window_s / 10)
        self._shown: frozenset[str] = frozenset()
        self._proofs_due = 0
        self._proven_at = clock()
        self._ends: dict[str, End] = {}
        self._asked: dict[str, int] = {}
        self._boots: dict[str, _Boot] = {}
        self._lives: dict[str, _Life] = {}
        self._jobs: dict[str, _Job] = {}

    def end_of(self, pod: Pod) -> End | None:
        if is_over(pod):
            return self._ends.get(pod.id) or end_of(pod.status, None)
        job = self._jobs.get(pod.id)
        return job.end if job is not None and job.started_at == pod.started_at else None

    def trouble_of(self, pod: Pod) -> str | None:
        boot, life = self._boots.get(pod.id), self._lives.get(pod.id)
        if boot is not None and boot.failing_since is not None:
            return f"its image cannot be pulled: {boot.said}"
        if life is not None and life.restarts >= _LOOPING:
            return f"its container has ended and begun again {life.restarts} times: RunPod starts it for ever"
        return None

    def image_failed(self, pod: Pod) -> bool:
        """Its image could not be pulled for as long as a new registry login may take to work."""
        boot = self._boots.get(pod.id)
        if boot is None or boot.failing_since is None or boot.looked_at is None:
            return False
        return boot.looked_at - boot.failing_since >= self._pull_window_s

    async def round(self, machine: Callable[[Pod], Machine]) -> Round:
        """Every pod of the account, all pages.

        Raises:
            Unavailable, Throttled: nothing is known.
        """
        pods, unknown, calls, offset_s = await self._pages()
        account = self._parts.proven
        if self._needs_proof(pods):
            calls += 1
            try:
                account = await self._parts.proof(make=False)
                self._proven_at = self._clock()
            except ProviderError as error:
                unknown = unknown or f"whether it is our account's cannot be told: {error}"
            else:
                if account is None:
                    unknown = unknown or "it is not our account's: our template is not shown there"
        calls += await self.explain(pods)
        calls += await self._look_at_boots(pods)
        calls += await self.look_at_jobs(pods)
        if unknown is None:
            self._remember(pods)
        return Round(
            region="",
            account_id=account,
            machines=tuple(machine(pod) for pod in pods),
            unknown=unknown,
            calls=calls,
            clock_offset_s=offset_s,
        )

    async def explain(self, pods: Iterable[Pod]) -> int:
        """Ask why pods are over, of those that nobody has told yet; how many requests it took."""
        calls = 0
        for pod in pods:
            asked = self._asked.get(pod.id, 0)
            if not is_over(pod) or pod.id in self._ends or asked >= _ASKS_FOR_AN_END:
                continue
            if calls >= _ENDS_A_ROUND:
                break
            calls += 1
            self._asked[pod.id] = asked + 1
            try:
                data = await self._graphql(_REASON, {"id": pod.id})
            except ProviderError:
                continue  # it only says why: that the pod is over is certain
            said = (data.get("pod") or {}).get("lastStatusChange")
            if isinstance(said, str) and said:
                self._ends[pod.id] = end_of(pod.status, said[:500])
        return calls

    async def balance(self) -> Balance:
        """Raises:
        Unavailable, Throttled: nothing is known.
        """
        myself = (await self._graphql(_BALANCE, {})).get("myself")
        if not isinstance(myself, dict) or (usd := _dollars(myself.get("clientBalance"))) is None:
            raise Unavailable("the balance was not told")
        return Balance(
            usd=usd,
            burn_usd_per_hour=_dollars(myself.get("currentSpendPerHr")),
            limit_usd_per_hour=_dollars(myself.get("spendLimit")),
        )

    # --- inside ---

    async def _pages(self) -> tuple[list[Pod], str | None, int, float | None]:
        """The pods, why they may not be all, the requests, and the offset of the cloud's clock."""
        pods: dict[str, Pod] = {}
        seen: set[str] = set()
        query = {"limit": str(_PAGE)}
        offset_s: float | None = None
        calls, unknown = 0, None
        while True:
            calls += 1
            try:
                reply = await read(self._client, "/pods", query=query)
                page = parsed(PodPage, reply)
            except ProviderError as error:
                if calls == 1 and not isinstance(error, Garbled):
                    raise
                return list(pods.values()), f"page {calls}: {error}", calls, offset_s
            offset_s = reply.clock_offset_s if offset_s is None else offset_s
            if any(pod.id in pods for pod in page.pods):
                unknown = f"page {calls} shows pods of an earlier page"
            pods |= {pod.id: pod for pod in page.pods}
            if page.pagination is None or not page.pagination.has_next:
                return list(pods.values()), unknown, calls, offset_s
            cursor = page.pagination.next_cursor
            if not cursor or cursor in seen:
                return list(pods.values()), f"page {calls} does not lead to the next one", calls, offset_s
            seen.add(cursor)
            query = {"limit": str(_PAGE), "cursor": cursor}

    def _needs_proof(self, pods: Sequence[Pod]) -> bool:
        if not self._shown <= {pod.id for pod in pods}:
            self._proofs_due = _PROOFS  # whoever concludes that it is gone does so from more than one list
        due = self._proofs_due > 0
        self._proofs_due = max(0, self._proofs_due - 1)
        overdue = self._clock() - self._proven_at >= _PROVE_EVERY_S
        return self._parts.proven is None or due or overdue

    async def _look_at_boots(self, pods: Sequence[Pod]) -> int:
        """Read what the host says of pods that take long; how many requests it took."""
        now, looks = self._clock(), 0
        for pod in pods:
            if is_over(pod) or state_of(pod) == "running":
                self._boots.pop(pod.id, None)
                continue
            boot = self._boots.setdefault(pod.id, _Boot(since=now))
            waited_s = now - (boot.since if boot.looked_at is None else boot.looked_at)
            if looks >= _LOOKS_A_ROUND or waited_s < self._look_after_s:
                continue
            looks += 1
            try:
                lines = await system_lines(self._client, pod.id)
            except ProviderError:
                continue
            boot.looked_at = self._clock()
            said = next((line for line in reversed(lines) if _is_about_image(line)), None)
            if said is None:
                continue  # the host says nothing of it now, so what it said before stands
            if not any(text in said.lower() for text in _PULL_FAILED):
                boot.failing_since = None
            elif boot.failing_since is None:
                boot.failing_since = boot.looked_at
            boot.said = said[:300]
        return looks

    async def look_at_jobs(self, pods: Iterable[Pod]) -> int:
        """Read how commands ended, of the pods that report it; how many requests it took."""
        now = self._clock()
        due = []
        for pod in pods:
            if JOB_VARIABLE not in pod.env or state_of(pod) != "running":
                continue
            job = self._jobs.get(pod.id)
            if job is None or job.started_at != pod.started_at:
                job = self._jobs[pod.id] = _Job(started_at=pod.started_at, looked_at=None)
            if job.end is None and (job.looked_at is None or now - job.looked_at >= self._job_every_s):
                due.append((pod, job))
        due.sort(key=lambda each: each[1].looked_at or 0.0)
        await asyncio.gather(*(self._look_at_job(pod, job) for pod, job in due[:_JOBS_A_ROUND]))
        return len(due[:_JOBS_A_ROUND])

    async def _look_at_job(self, pod: Pod, job: "_Job") -> None:
        job.looked_at = self._clock()
        with suppress(ProviderError):  # it is looked at again
            job.end = await reported_end(self._client, pod.id, since=pod.started_at, identity=pod.reporter)

    def _remember(self, pods: Sequence[Pod]) -> None:
        """What a whole list showed; whatever it did not show is forgotten."""
        self._shown = frozenset(pod.id for pod in pods)
        for memory in (self._ends, self._asked, self._boots, self._lives, self._jobs):
            for pod_id in memory.keys() - self._shown:
                del memory[pod_id]
        for pod in pods:
            if pod.runtime is None or pod.runtime.uptime is None:
                continue
            life = self._lives.setdefault(pod.id, _Life(uptime=pod.runtime.uptime))
            life.restarts += pod.runtime.uptime < life.uptime
            life.uptime = pod.runtime.uptime

    async def _graphql(self, text: str, variables: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._client.graphql(text, variables)
        except (NotSent, NoAnswer) as error:
            raise Unavailable(str(error)) from error
        try:
            body = orjson.loads(reply.raw)
        except orjson.JSONDecodeError:
            body = None
        if reply.status != 200 or not isinstance(body, dict) or body.get("errors"):
            raise Unavailable(f"the older API answered {reply.status}: {reply.said}")
        data = body.get("data")
        return data if isinstance(data, dict) else {}


def _is_about_image(line: str) -> bool:
    lower = line.lower()
    return "image" in lower or "pull" in lower or "manifest" in lower


def _dollars(value: Any) -> Decimal | None:
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        return None
    return usd if usd.is_finite() else None
