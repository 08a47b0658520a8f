"""A look without a leader: what commands judge by, with the controller away, or with nothing left at all.

It asks the clouds itself, through an inventory of its own, so that its lists are whole by the same rules. The
database is read; the API server too where it answers, else the claims as they were last mirrored. Nothing is
written and nothing is ended. With neither database nor cluster only the clouds' lists are left, and of those
the identities say whose each machine is.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal

import structlog
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.inventory.accounts import Account, Accounts, BadOptions
from app.inventory.rounds import AccountKey, Inventory, Place
from app.kube import paths
from app.kube.auth import NoCluster
from app.kube.client import Kube
from app.kube.credentials import CredentialSecrets
from app.kube.errors import KubeError
from app.kube.installation import check_installation
from app.settings import ProviderEntry, Settings
from app.store import findings as rows
from app.store import rentals, seen
from app.store.engine import begin
from app.store.sweep_facts import Rows, mirrored_claims, read, regions
from app.sweep.facts import UNOPENED, Listed, Lists, bounds_of, facts_of, version
from app.sweep.judge import judge
from app.sweep.model import ClaimFact, Facts, Finding, Judgement, Kind, Limits, Mode
from app.sweep.parts import PartList, judge_parts
from providers.base import ClaimUid, Provider, ProviderError, Ref, ResourceId
from providers.capabilities import HasParts

log = structlog.get_logger()
OPEN_S = 20.0
CLUSTER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One look. ``cluster``: where the claims came from. ``last``: the leader's last sweep, None without."""

    facts: Facts
    judgement: Judgement
    findings: tuple[Finding, ...]
    cluster: str
    unread: str | None  # why the API server was not read
    last: RowMapping | None
    unexplained_usd: Decimal | None  # of the clouds' bills of seven days; None: no cloud here tells its bill

    @property
    def incomplete(self) -> bool:
        """Whether some list was not whole, or none was asked for: "no finding" means less than it seems."""
        places = self.facts.places
        return not places or any(place.unknown for each in places.values() for place in each)


class NothingInstalled(LookupError):
    """The database has no installation yet: no controller has run with it."""


async def audit(settings: Settings, engine: AsyncEngine) -> Audit:
    """Look with the database, and with the cluster if it answers.

    Raises:
        StoreUnavailable: the database cannot be read.
        NothingInstalled: see there.
        OtherInstallation: the cluster that answers is not this database's.
    """
    async with begin(engine) as conn:
        head = await read(conn, version=version(), uids=(), ids=())
        if head is None:
            raise NothingInstalled("the database has no installation: no controller has run with it yet")
        known_regions = await regions(conn)
        run_accounts = await rentals.open_run_accounts(conn)
        expected = {
            entry.key: await seen.present(conn, provider=entry.name, account=entry.account)
            for entry in settings.providers
        }

    def recorded(key: AccountKey) -> str:
        ids = run_accounts.get(key, frozenset())
        return next(iter(ids), "") if len(ids) < 2 else f"one of {', '.join(sorted(ids))}"

    async with AsyncExitStack() as stack:
        kube = await _cluster(settings, stack, installation=head.installation)
        look = _Look(settings, head.installation, known_regions, recorded, kube=kube)
        await stack.enter_async_context(look)
        for key, shown in expected.items():
            look.expect(key, shown)
        lists, parts = await look.lists()  # the clouds first, then the cluster, then the rows
        bounds = {account.key: bounds_of(account, settings) for account in look.accounts}
        claims, cluster, unread = await _claims(kube, engine)
        async with begin(engine) as conn:
            uids = lists.claims(head.installation) | {str(one.uid) for one in claims}
            found = await read(conn, version=version(), uids=uids, ids=lists.ids())
            here = look.inventory.now()
            last = await rows.last_run(conn)
            unexplained = await rows.unexplained_usd(conn)
    if found is None:
        raise NothingInstalled("the installation's row vanished while it was read")
    facts = facts_of(
        found,
        installation=head.installation,
        lists=lists.newest.values(),
        here=here,
        accounts=[entry.key for entry in settings.providers],
        bounds={entry.key: bounds.get(entry.key, UNOPENED) for entry in settings.providers},
        claims=claims,
        mode=_mode(settings, found, last),
        limits=Limits.of(settings),
    )
    judgement = judge(facts)
    if not settings.providers:  # whoever gave us none has not said that the accounts are gone
        told = tuple(one for one in judgement.findings if one.kind is not Kind.PROVIDER_REMOVED)
        judgement = replace(judgement, findings=told)
    findings = (*judgement.findings, *judge_parts(facts, parts))
    return Audit(
        facts=facts,
        judgement=judgement,
        findings=findings,
        cluster=cluster,
        unread=unread,
        last=last,
        unexplained_usd=unexplained,
    )


async def offline(settings: Settings, installation: str) -> Facts:
    """What the clouds show, over all regions that they have, with neither database nor cluster."""
    look = _Look(settings, installation, {}, lambda _key: "", kube="not asked")
    async with look:
        lists, _ = await look.lists()
        nothing = Rows(
            now=datetime.now(UTC),
            installation=installation,
            held=None,
            version_since=None,
            rentals=[],
            runs=[],
            seen=[],
            protections=[],
            owners=[],
            findings=[],
        )
        return facts_of(
            nothing,
            installation=installation,
            lists=lists.newest.values(),
            here=look.inventory.now(),
            accounts=[entry.key for entry in settings.providers],
            bounds={},
            claims=(),
            mode=Mode(),
            limits=Limits(),
        )


class _Look:
    """Accounts opened once, listed once, closed."""

    def __init__(
        self,
        settings: Settings,
        installation: str,
        known_regions: dict[AccountKey, set[str]],
        recorded: Callable[[AccountKey], str | None],
        *,
        kube: Kube | str,
    ) -> None:
        self._settings, self._known, self._kube = settings, known_regions, kube
        self._offered: dict[AccountKey, set[str]] = {}
        self.accounts = Accounts(settings, installation, credentials=self._credentials)
        self._lists = Lists()
        self.inventory = Inventory(
            accounts=self.accounts,
            installation=installation,
            settings=settings,
            scope=lambda key: self._known.get(key, set()) | self._offered.get(key, set()),
            recorded_account=recorded,
            prepare=_nothing,
        )
        self.inventory.on_round(self._lists.take)
        self._opening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_Look":
        self._opening = asyncio.create_task(self.accounts.run(), name="open accounts")
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                tried = asyncio.create_task(self.accounts.tried())
                await asyncio.wait({tried, self._opening}, return_when=asyncio.FIRST_COMPLETED)
                tried.cancel()
        if self._opening.done() and (error := self._opening.exception()) is not None:
            refused = error.subgroup(BadOptions) if isinstance(error, BaseExceptionGroup) else None
            raise refused.exceptions[0] if refused is not None else error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _credentials(self, entry: ProviderEntry) -> Mapping[str, str]:
        """Those of the account's Secret, as the controller has them; {}, the environment's, where that cannot
        be read: the cluster is away, or the Secret is not for this person. That they lead to the account in
        which our machines are is seen to before anything is concluded.
        """
        if isinstance(self._kube, str):
            return {}
        secrets = CredentialSecrets(self._kube, namespace=self._settings.namespace)
        try:
            async with asyncio.timeout(CLUSTER_S):
                return await secrets.of(entry) or {}
        except TimeoutError:
            return {}

    def expect(self, key: AccountKey, shown: Sequence[seen.Seen]) -> None:
        """What was there when last heard of: a list without it is a shrink to be explained."""
        places: dict[Place, list[Ref]] = {}
        for row in shown:
            place = self.inventory.place(key, row.region)
            if place is not None and row.claim_uid is not None:
                ref = Ref(
                    provider=row.provider,
                    account=row.account,
                    region=row.region,
                    resource_id=ResourceId(row.resource_id),
                )
                places.setdefault(place, []).append(ref)
        for place, refs in places.items():
            self.inventory.expect(place, refs)

    async def lists(self) -> tuple[Lists, list[PartList]]:
        """Every account's machines and parts; an account that cannot be listed is an unknown list."""
        parts: list[PartList] = []
        for entry in self._settings.providers:
            account = self.accounts.get(entry.key)
            if account is None:
                self._unknown(entry.key, "the account cannot be opened")
                continue
            trouble = None
            if account.traits.lists_by_region:
                trouble = await self._ask_regions(entry.key, account.provider)
            await self.inventory.poll_once(account)
            if trouble is not None:
                self._unknown(entry.key, f"its regions are not known: {trouble}")
            if isinstance(account.provider, HasParts):
                regions_of = {place.region for place in self._lists.newest if _key(place) == entry.key}
                try:
                    for one in await account.provider.parts(frozenset(regions_of)):
                        parts.append(
                            PartList(key=entry.key, region=one.region, parts=one.parts, unknown=one.unknown)
                        )
                except ProviderError as error:
                    parts.append(PartList(key=entry.key, region="", parts=(), unknown=str(error)))
        return self._lists, parts

    async def _ask_regions(self, key: AccountKey, provider: Provider) -> str | None:
        try:
            self._offered[key] = {offering.region for offering in await provider.offers()}
        except ProviderError as error:
            return str(error) or type(error).__name__
        return None

    def _unknown(self, key: AccountKey, why: str) -> None:
        place = Place(provider=key[0], account=key[1], region="")
        self._lists.newest[place] = Listed(
            place=place, machines=(), began_at=self.inventory.now(), unknown=why
        )


async def _nothing(_account: Account) -> None:
    """Nothing is to be loaded before a list: that was done first."""


def _key(place: Place) -> AccountKey:
    return (place.provider, place.account)


async def _cluster(settings: Settings, stack: AsyncExitStack, *, installation: str) -> Kube | str:
    """The way to the API server, or why there is none.

    Raises:
        OtherInstallation: it answers, and is not this database's.
    """
    try:
        kube = await stack.enter_async_context(await Kube.connect(kubeconfig=settings.kubeconfig))
    except (NoCluster, OSError) as error:
        return str(error)[:200]
    with suppress(TimeoutError):  # the claims' list then says what is the matter
        async with asyncio.timeout(CLUSTER_S):
            await check_installation(kube, namespace=settings.namespace, ours=installation)
    return kube


async def _claims(kube: Kube | str, engine: AsyncEngine) -> tuple[list[ClaimFact], str, str | None]:
    """The claims by a live list, else as they were last mirrored; where from; why not live."""
    try:
        if isinstance(kube, str):
            raise NoCluster(kube)
        async with asyncio.timeout(CLUSTER_S):
            found = [
                ClaimFact(
                    uid=ClaimUid(obj["metadata"]["uid"]),
                    name=obj["metadata"]["name"],
                    namespace=obj["spec"]["podRef"]["namespace"],
                    pod=obj["spec"]["podRef"]["name"],
                    provider=obj["spec"]["provider"],
                    account=obj["spec"].get("account") or keys.DEFAULT_ACCOUNT,
                    created_at=datetime.fromisoformat(obj["metadata"]["creationTimestamp"]),
                    deleting="deletionTimestamp" in obj["metadata"],
                )
                async for page in kube.list_pages(paths.nodeclaims())
                for obj in page["items"]
            ]
            return found, "live", None
    except (NoCluster, KubeError, TimeoutError, OSError) as error:
        unread = str(error)[:200] or "no answer"
    async with begin(engine) as conn:
        mirrored = await mirrored_claims(conn)
    return [_mirrored(row) for row in mirrored], "as last mirrored", unread


def _mirrored(row: RowMapping) -> ClaimFact:
    return ClaimFact(
        uid=ClaimUid(row["uid"]),
        name=row["name"],
        namespace=row["pod_namespace"],
        pod=row["pod_name"],
        provider=row["provider"],
        account=row["account"],
        created_at=row["created_at"],
        deleting=row["deleting"],
    )


def _mode(settings: Settings, found: Rows, last: RowMapping | None) -> Mode:
    """As the leader will see it; its own last word on report mode counts, where there is one."""
    mode = last["mode"] if last is not None else settings.sweep_mode
    report = "sweep-mode is report" if mode == "report" else None
    if report is None and last is not None:
        report = next((text for text in last["report_only"] if text.startswith("until ")), None)
    return Mode(report=report, held=found.held)
