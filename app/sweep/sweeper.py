"""The leader's duty: judge what the clouds show, write it down, and end what nothing speaks for.

It asks no cloud for machines: the inventory's rounds are the only lists. It ends no machine itself either:
what it decides goes through `Provisioning.end_forgotten`, which looks at everything once more. Only parts,
which no rental stands for, it drops by itself. Losing the lead stops it between two machines.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.inventory.identity import parse
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from app.kube.events import ObjectRef, Recorder
from app.provisioning.model import ClaimUnreadable, Leadership
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store import findings as rows
from app.store.engine import StoreUnavailable, begin
from app.store.installation import bind_cluster, held, hold
from app.store.sweep_facts import Rows, mirrored_claim, read
from app.sweep import metrics
from app.sweep.facts import UNOPENED, Lists, bounds_of, facts_of, version, whole_lists
from app.sweep.judge import judge
from app.sweep.model import AccountKey, ClaimFact, Facts, Finding, Judgement, Kind, Limits, Mode, Next
from app.sweep.parts import PartList, judge_parts, part_id
from app.sweep.trail import Trail
from providers.base import ClaimUid, ProviderError, Ref
from providers.capabilities import HasParts, Part

log = structlog.get_logger()

EAGER = 20  # so many sweeps at the start of a term come at a sixth of the interval
PARTS_EVERY = 10  # intervals between two lists of parts
AT_ONCE = 4  # ends that are begun side by side
POD_LOOKS = 50  # live GETs of Pods in one sweep


class Sweeper:
    """One term's. The caches are the caller's to run; ``pods`` holds the opted-in Pods."""

    def __init__(
        self,
        *,
        kube: Kube,
        claims: Cache,
        pods: Cache,
        pools: Cache,
        accounts: Accounts,
        provisioning: Provisioning,
        engine: AsyncEngine,
        settings: Settings,
        installation: str,
        leadership: Leadership,
        events: Recorder,
        leader: str,
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._door = kube.room("sweep"), ClaimDoor(kube.room("sweep"))
        self._claims, self._pods, self._pools = claims, pods, pools
        self._accounts, self._provisioning, self._engine = accounts, provisioning, engine
        self._settings, self._installation, self._leadership = settings, installation, leadership
        self._events, self._clock = events, clock
        self._lists, self._parts = Lists(), dict[AccountKey, tuple[PartList, ...]]()
        self._parts_at: dict[AccountKey, float] = {}
        self._bounds: dict[AccountKey, float] = {}
        self._trail = Trail(installation=installation, leader=leader, version=version())
        self._began = clock()
        self._cluster_uid: str | None = None
        provisioning.inventory.on_round(self._lists.take)

    async def run(self) -> None:
        """Sweep until cancelled: often at first, then at the settled pace."""
        done = 0
        try:
            while True:
                eager = done < EAGER
                await asyncio.sleep(self._settings.sweep_every_s / (6 if eager else 1))
                try:
                    if await self.sweep() is not None:
                        done += 1
                except StoreUnavailable as error:
                    log.info("not swept: the store is away", error=str(error)[:256])
                except Exception:
                    log.exception("a sweep failed")
        finally:
            metrics.clear()

    async def sweep(self) -> Judgement | None:
        """One sweep; None if we do not lead.

        Raises:
            StoreUnavailable: nothing was judged, or not all of it written.
        """
        if not self._leadership.valid() or self._leadership.epoch is None:
            return None
        await self._list_parts()
        # First the clouds, then the cluster, then the rows.
        lists = tuple(self._lists.newest.values())
        claims, claims_unread = await self._read_claims()
        uids, ids = self._lists.claims(self._installation), self._lists.ids()
        for found in self._parts.values():
            identities = (parse(part.identity) for one in found for part in one.parts)
            uids |= {str(own.claim_uid) for own in identities if own is not None}
        await self._bind_cluster()
        async with begin(self._engine) as conn:
            before = await read(conn, version=version(), uids=uids, ids=ids)
            here = self._provisioning.inventory.now()
        if before is None:
            return None
        configured = [entry.key for entry in self._settings.providers]
        bounds = dict.fromkeys(configured, UNOPENED)
        bounds |= {account.key: bounds_of(account, self._settings) for account in self._accounts}
        facts = facts_of(
            before,
            installation=self._installation,
            lists=lists,
            here=here,
            accounts=configured,
            bounds=bounds,
            claims=claims,
            mode=self._mode(before, claims_unread),
            limits=Limits.of(self._settings),
        )
        judgement = judge(facts)
        parts = [one for found in self._parts.values() for one in found]
        findings = (*judgement.findings, *judge_parts(facts, parts))
        terminated = await self._act(facts, judgement, findings, before)
        self._show(facts, judgement, findings)
        async with begin(self._engine) as conn:
            mode = self._settings.sweep_mode
            await self._trail.ran(conn, facts, judgement, mode=mode, terminated=terminated, findings=findings)
        return judgement

    # --- facts ---------------------------------------------------------------------------------------

    async def _read_claims(self) -> tuple[list[ClaimFact], str | None]:
        """The claims of the synced watch; that a Pod is gone only by a live GET. Why they are unknown."""
        if not self._claims.is_synced:
            return [], "the watch of claims is not synced"
        found, looks = [], POD_LOOKS
        for obj in self._claims:
            metadata, spec = obj["metadata"], obj["spec"]
            ref = spec["podRef"]
            exists: bool | None = self._pods.by_uid(ref["uid"]) is not None or None
            if exists is None and looks and "deletionTimestamp" not in metadata:
                looks -= 1
                exists = await self._pod_exists(ref)
            found.append(
                ClaimFact(
                    uid=ClaimUid(metadata["uid"]),
                    name=metadata["name"],
                    namespace=ref["namespace"],
                    pod=ref["name"],
                    provider=spec["provider"],
                    account=spec.get("account") or keys.DEFAULT_ACCOUNT,
                    created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
                    deleting="deletionTimestamp" in metadata,
                    pod_exists=exists,
                )
            )
        return found, None

    async def _pod_exists(self, ref: Obj) -> bool | None:
        try:
            pod = await self._kube.find(paths.pod(ref["namespace"], ref["name"]))
        except KubeError:
            return None
        return pod is not None and pod["metadata"]["uid"] == ref["uid"]

    async def _bind_cluster(self) -> None:
        """Hold the sweeps of a cluster that is a copy. An API server that is away says nothing."""
        try:
            if self._cluster_uid is None:
                found = await self._kube.get(paths.namespace("kube-system"))
                self._cluster_uid = str(found["metadata"]["uid"])
        except KubeError:
            return
        async with begin(self._engine) as conn:
            other = await bind_cluster(conn, self._cluster_uid)
            if other is not None:
                await hold(
                    conn, f"this is cluster {self._cluster_uid}, the store is of cluster {other}: a copy?"
                )

    def _mode(self, before: Rows, claims_unread: str | None) -> Mode:
        settings, now = self._settings, before.now
        report = "sweep-mode is report" if settings.sweep_mode == "report" else None
        if report is None:
            since = before.version_since or now
            until = since + timedelta(seconds=settings.sweep_report_only_s)
            if now < until:
                report = f"until {until:%Y-%m-%d %H:%M} UTC: version {version()} is new here"
        left = 2 * settings.sweep_every_s - (self._clock() - self._began)
        not_leader = "this replica has only begun to lead" if left > 0 else None
        return Mode(report=report, held=before.held, not_leader=not_leader, claims_unread=claims_unread)

    async def _list_parts(self) -> None:
        """Ask each cloud that has parts for them, now and then. A failure leaves the list unknown."""
        for account in self._accounts:
            if not isinstance(account.provider, HasParts):
                continue
            every_s = PARTS_EVERY * self._settings.sweep_every_s
            if self._clock() - self._parts_at.get(account.key, float("-inf")) < every_s:
                continue
            self._parts_at[account.key] = self._clock()
            self._parts[account.key] = await self._parts_of(account, account.provider)

    async def _parts_of(self, account: Account, provider: HasParts) -> tuple[PartList, ...]:
        places = self._lists.newest
        regions = {place.region for place in places if (place.provider, place.account) == account.key}
        await account.budget.take(Urgency.LIST)
        try:
            async with asyncio.timeout(account.call_timeout_s * 4):
                rounds = await provider.parts(frozenset(regions))
        except (ProviderError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            return (PartList(key=account.key, region="", parts=(), unknown=why),)
        return tuple(
            PartList(
                key=account.key,
                region=one.region,
                parts=one.parts,
                unknown=one.unknown
                or (None if one.account_id == account.account_id else f"account {one.account_id} answered"),
            )
            for one in rounds
        )

    # --- deeds ---------------------------------------------------------------------------------------

    async def _act(
        self, facts: Facts, judgement: Judgement, findings: tuple[Finding, ...], before: Rows
    ) -> int:
        """Write all of it down, then end what is to be ended; how many ends have begun."""
        lists = [one for found in self._parts.values() for one in found]
        whole = frozenset((*one.key, one.region) for one in lists if one.unknown is None)
        async with begin(self._engine) as conn:
            written = await self._trail.write(conn, facts, findings, before, parts_whole=whole)
        for one in written.new:
            self._log("finding", one, written.ids[one.key])
        for key, how in written.resolved:
            log.info("finding resolved", key=key, how=how)
        self._count_blocked(findings, before)
        places = asyncio.Semaphore(AT_ONCE)

        async def end(one: Finding) -> bool:
            async with places:
                if not self._leadership.valid() or not self._listed_whole(one):
                    return False
                try:
                    return await self._end(one, written.ids[one.key])
                except StoreUnavailable as error:
                    log.info("not ended: the store is away", key=one.key, error=str(error)[:256])
                except Exception:  # of one machine: the others' ends go on
                    log.exception("an end failed", key=one.key)
                return False

        async with asyncio.TaskGroup() as ends:
            tasks = [ends.create_task(end(one)) for one in findings if one.next is Next.TERMINATE]
        return sum(task.result() for task in tasks)

    def _listed_whole(self, one: Finding) -> bool:
        """Whether the newest list of its place is whole still: a sweep over many takes a while."""
        newest = self._lists.newest.values()
        of_it = [
            each
            for each in newest
            if (each.place.provider, each.place.account) == (one.provider, one.account)
        ]
        return all(each.unknown is None for each in of_it if each.place.region in ("", one.region))

    async def _end(self, one: Finding, finding_id: int) -> bool:
        """End one machine, or drop one part. The intent is on record before anything is asked."""
        async with begin(self._engine) as conn:
            # The sweep has read its rows before, maybe long before: a sweep over many takes a while.
            if await rows.is_protected(conn, one.provider, one.account, _names(one)):
                return False
            await rows.executing(conn, finding_id, detail={"identity": one.raw_identity})
        try:
            if one.kind is Kind.LEFTOVER_PART:
                answer = await self._drop(one)
            else:
                answer = await self._terminate(one, finding_id)
        except (ClaimUnreadable, ProviderError, TimeoutError) as error:
            answer = f"failed: {str(error) or type(error).__name__}"
        async with begin(self._engine) as conn:
            await rows.answered(conn, finding_id, answer)
            owner = await mirrored_claim(conn, one.claim_uid) if one.claim_uid else None
        self._log("orphan ended", one, finding_id, answer=answer)
        begun = answer.startswith("begun")
        if begun:
            self._tell(one, finding_id, owner)
        return begun

    async def _terminate(self, one: Finding, finding_id: int) -> str:
        identity = parse(one.raw_identity)
        if identity is None or one.resource_id is None:
            return "refused: its identity cannot be read"
        ref = Ref(provider=one.provider, account=one.account, region=one.region, resource_id=one.resource_id)
        return await self._provisioning.end_forgotten(ref, identity, reason=f"orphan: finding {finding_id}")

    async def _drop(self, one: Finding) -> str:
        """A part: the hold and its claim are looked at once more; the cloud itself says if it is in use."""
        account = self._accounts.get((one.provider, one.account))
        part = self._part(one)
        if account is None or part is None or not isinstance(account.provider, HasParts):
            return "refused: it is not listed any more"
        async with begin(self._engine) as conn:
            if (why := await held(conn)) is not None:
                return f"refused: sweeps are held: {why.reason}"
        if one.claim_uid is not None and await self._door.find(one.claim_uid):
            return "refused: its claim exists"
        if one.claim_uid is None and part.in_use is not False and await self._busy(account.key):
            return "refused: a claim of the account has come, which may want it"
        await account.budget.take(Urgency.TERMINATE)
        if not self._leadership.valid():
            return "refused: we do not lead"
        async with asyncio.timeout(account.call_timeout_s):
            answer = await account.provider.drop_part(part)
        self._parts_at.pop(account.key, None)
        return f"begun: {answer.value}"

    async def _busy(self, key: AccountKey) -> bool:
        """Whether any claim of the account exists, by a live list."""
        try:
            async for page in self._kube.list_pages(paths.nodeclaims()):
                for item in page["items"]:
                    spec = item["spec"]
                    if (spec["provider"], spec.get("account") or keys.DEFAULT_ACCOUNT) == key:
                        return True
        except KubeError as error:
            raise ClaimUnreadable(f"NodeClaims: {error}") from error
        return False

    def _part(self, one: Finding) -> Part | None:
        lists = self._parts.get((one.provider, one.account), ())
        return next(
            (part for listed in lists for part in listed.parts if part_id(part) == one.resource_id), None
        )

    # --- telling -------------------------------------------------------------------------------------

    def _count_blocked(self, findings: Iterable[Finding], before: Rows) -> None:
        was = {row["key"]: row["blocked_by"] for row in before.findings}
        for one in findings:
            if one.next is Next.BLOCKED and one.blocked_by and was.get(one.key) != one.blocked_by:
                metrics.BLOCKED.labels(reason=one.blocked_by).inc()

    def _show(self, facts: Facts, judgement: Judgement, findings: tuple[Finding, ...]) -> None:
        for key, bounds in facts.bounds.items():
            if bounds is not UNOPENED and self._bounds.get(key) != bounds.orphan_s:
                self._bounds[key] = bounds.orphan_s
                metrics.BOUND.labels(provider=key[0], account=key[1]).set(bounds.orphan_s)
                log.info("orphans end within", provider=key[0], account=key[1], bound_s=bounds.orphan_s)
        metrics.show(
            replace(judgement, findings=findings),
            whole=whole_lists(facts),
            report_only=any((facts.mode.report, facts.mode.held)),
            now=facts.now.timestamp(),
        )

    def _log(self, event: str, one: Finding, finding_id: int, **more: str) -> None:
        log.warning(
            event,
            finding=finding_id,
            kind=one.kind.value,
            provider=one.provider,
            resource=one.resource_id,
            claim_uid=one.claim_uid,
            why=one.why,
            next=one.next.value,
            blocked_by=one.blocked_by,
            usd_per_hour=None if one.usd_per_hour is None else str(one.usd_per_hour),
            **more,
        )

    def _tell(self, one: Finding, finding_id: int, owner: Mapping[str, Any] | None) -> None:
        """Events on the claim, as long as anybody remembers it, and on its NodePool, or else the Node."""
        usd = "unknown" if one.usd_per_hour is None else f"${one.usd_per_hour:f}"
        text = (
            f"finding {finding_id}: {one.kind} {one.resource_id} on {one.provider} is ended:"
            f" {one.why}; {usd} an hour"
        )
        about: list[ObjectRef | Obj] = []
        found = None
        if owner is not None:
            about.append(
                ObjectRef(
                    api_version=keys.API_VERSION,
                    kind=keys.NODE_CLAIM,
                    name=owner["name"],
                    uid=owner["uid"],
                )
            )
            found = self._pools.get("", owner["pool"])
        if found is not None:
            about.append({"apiVersion": keys.API_VERSION, "kind": keys.NODE_POOL} | found)
        else:
            node = keys.node_name(one.provider, one.account)
            about.append(ObjectRef(api_version="v1", kind="Node", name=node, uid=node))
        for each in about:
            self._events.note(each, type="Warning", reason="OrphanEnded", message=text)


def _names(one: Finding) -> list[str]:
    """What a protection may call it: a part by its kind and id, or by its id alone."""
    name = one.resource_id or ""
    return [name, name.partition("/")[2]] if one.kind is Kind.LEFTOVER_PART else [name]
