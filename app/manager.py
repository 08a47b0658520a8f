"""Composes a replica: what always runs, and what only the leader runs.

Everything of the leader is made anew for each term, its caches too, so nothing seen under an older epoch is
ever acted on. Every replica opens the accounts and asks what can be rented, because every one answers
admission; only the leader lists machines. The store may be away at any time: then renting waits, and
everything else goes on.
"""

import asyncio
import os
import signal
import socket
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from secrets import token_urlsafe
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.admission.server import Admission
from app.api import keys
from app.claims.controller import Claims
from app.duties import Watches, watch_over
from app.inventory.accounts import Account, Accounts, installed_adapters
from app.inventory.budget import Urgency
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.cache import Cache
from app.kube.claims import ClaimDoor
from app.kube.client import Kube, Obj
from app.kube.credentials import CredentialSecrets
from app.kube.errors import Exists, KubeError
from app.kube.events import Recorder
from app.kube.installation import INSTALLATION_SECRET, MACHINES_SECRET
from app.kube.lease import Election, Term, TermOver, boot_clock
from app.kubelet.server import Kubelet
from app.ledger.budgets import Budgets
from app.ledger.duty import Ledger
from app.machines.keys import SECRET_BYTES
from app.mirror.mirror import Mirror
from app.placement.bindings import Bindings
from app.placement.controller import Placement
from app.placement.market import Adapters
from app.provisioning.service import Provisioning
from app.settings import Settings
from app.store.engine import StoreUnavailable, begin, engine_of
from app.store.installation import (
    NotInstalled,
    cluster_of,
    epoch_of,
    get_or_create,
    hold,
    id_of,
    lineage,
    next_epoch,
    set_epoch_at_least,
)
from app.store.migrate import SchemaTooNew, migrate
from app.store.views import NoSuchRole, let_read
from app.sweep.sweeper import Sweeper
from app.telemetry.health import Health
from app.upkeep import Upkeep
from app.vnode.controller import VirtualNodes
from catalog.catalogue import load
from catalog.offerings import Offerings
from catalog.refresh import follow
from catalog.stock import Stock

log = structlog.get_logger()

FIRST_LOOK_S = 10.0  # how long standing for election waits for a first word about the database
START_GRACE_S = 10.0  # how long placement waits, at the start of a term, for clouds that are slow to answer
_OPTED_IN = f"{keys.ENABLED_LABEL}={keys.ENABLED}"
_OUR_NODES = f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}"


class Store:
    """Whether the schema is there, and the database this installation's. Shared by all parts of a replica.

    ``migrated``: it is ours, and usable. ``stranger`` says why the database is not ours: then this replica is
    not ready. ``foreign``: it is another installation's or cluster's, and this replica takes no duties.
    ``candid``: it is not; also set when the database could not be asked, since most duties go on without one.
    """

    def __init__(self) -> None:
        self.migrated = asyncio.Event()
        self.trouble: str | None = "not reached yet"
        self.stranger: str | None = None
        self.foreign = asyncio.Event()
        self.candid = asyncio.Event()

    def judge(self, *, foreign: bool) -> None:
        """What a look at the database has shown."""
        if foreign:
            self.foreign.set()
            self.candid.clear()
            self.migrated.clear()
        else:
            self.foreign.clear()
            self.candid.set()


class TermLeadership:
    """`app.provisioning.model.Leadership` of one term: the epoch counts once both sides carry it."""

    def __init__(self, term: Term, store: Store) -> None:
        self._term, self._store = term, store
        self._settled: int | None = None

    @property
    def epoch(self) -> int | None:
        return self._settled

    def valid(self) -> bool:
        return self._term.valid() and not self._store.foreign.is_set()

    def settle(self, epoch: int) -> None:
        self._settled = epoch

    def unsettle(self) -> None:
        """The store lost it: nothing is rented until both sides carry one again."""
        self._settled = None


class Replica:
    """One process. `run` returns after an orderly end."""

    def __init__(self, settings: Settings, *, kube: Kube) -> None:
        """Reads the catalogue.

        Raises:
            BadCatalogue: a file of it cannot be used.
        """
        self._settings, self._kube = settings, kube
        self._catalogue = load(settings.catalog_dir, adapters=installed_adapters())
        self._offerings = Offerings()
        self._store = Store()
        self._leading = False
        self._watches = Watches()
        self._cluster_uid: str | None = None
        self._elected = asyncio.Event()  # an empty database waits for it
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ask for the orderly end: duties, then the Lease, then streams."""
        self._stop.set()

    async def run(self) -> None:
        """Serve and, when elected, lead, until `stop`.

        Raises:
            KubeError: the installation's Secret could not be read or made.
            OSError: an address cannot be listened on.
            BadOptions: an account's adapter refuses its options.
        """
        settings = self._settings
        installation = await self._installation()
        structlog.contextvars.bind_contextvars(installation=installation)
        engine = engine_of(settings)
        secrets = CredentialSecrets(self._kube, namespace=settings.namespace)
        machine_secret = await self._machine_secret()
        accounts = Accounts(settings, installation, credentials=secrets.of, machine_secret=machine_secret)
        stock = Stock(
            offerings=self._offerings,
            catalogue=self._catalogue,
            configured=frozenset(entry.key for entry in settings.providers),
        )
        admission = Admission(kube=self._kube, settings=settings, stock=stock)
        kubelet = None
        if settings.kubelet_address is not None:
            kubelet = Kubelet(kube=self._kube, settings=settings, accounts=accounts, engine=engine)
        else:
            log.warning("no kubectl logs and exec: --kubelet-address is not given")
        health = Health(
            settings.health_bind,
            checks={
                "admission": lambda: admission.trouble or None,
                "installation": lambda: self._store.stranger,
            },
            shown={"store": lambda: self._store.trouble, "leader": self._leader_line},
            live={"watches": self._watches.stale},
        )
        try:
            async with asyncio.TaskGroup() as serving:
                tasks = [
                    serving.create_task(health.run(), name="health"),
                    serving.create_task(admission.run(), name="admission"),
                    serving.create_task(self._keep_store(engine, installation), name="store"),
                    serving.create_task(self._follow_offers(accounts), name="offers"),
                ]
                if kubelet is not None:
                    tasks.append(serving.create_task(kubelet.run(), name="kubelet"))
                lead = serving.create_task(
                    self._elect(engine, installation, accounts, admission), name="election"
                )
                with _signals(self.stop):
                    stop = serving.create_task(self._stop.wait(), name="stop")
                    await asyncio.wait({stop, lead, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                if not self._stop.is_set():
                    stop.cancel()
                    await watch_over([lead, *tasks])
                log.info("stopping")
                lead.cancel()
                await asyncio.wait([lead])
                for task in tasks:
                    task.cancel()
        finally:
            await engine.dispose()

    def _leader_line(self) -> str | None:
        return None if self._leading else "another replica leads"

    # --- who we are ---

    async def _installation(self) -> str:
        """Our id, from the Secret beside the Lease."""
        return _decoded(await self._kept(INSTALLATION_SECRET, "id", new=new_installation))

    async def _machine_secret(self) -> bytes:
        """What machines' keys are derived from. Without that Secret, machines rented before let nobody in."""
        return b64decode(await self._kept(MACHINES_SECRET, "key", new=lambda: token_urlsafe(SECRET_BYTES)))

    async def _kept(self, name: str, entry: str, *, new: Callable[[], str]) -> str:
        """The entry of an immutable Secret of ours, in base64; made by whichever replica comes first."""
        path = paths.secret(self._settings.namespace, name)
        secret = await self._kube.find(path)
        if secret is None:
            body: Obj = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": {keys.MANAGED_BY_LABEL: keys.MANAGED_BY}},
                "immutable": True,
                "stringData": {entry: new()},
            }
            with suppress(Exists):
                await self._kube.create(paths.secrets(self._settings.namespace), body)
            secret = await self._kube.get(path)
        kept: str = secret["data"][entry]
        return kept

    async def _keep_store(self, engine: AsyncEngine, installation: str) -> None:
        """Migrate, compare ids, and from then on watch whether the store answers."""
        settings, store, wait_s = self._settings, self._store, self._settings.backoff_base_s
        readable = settings.report_role is None
        while True:
            first: str | None = None
            try:
                recorded = await self._recorded(engine)
                if recorded is None:
                    store.migrated.clear()  # new, or emptied under us
                if recorded in (None, installation) and not store.migrated.is_set():
                    await migrate(settings.direct_database_url or settings.database_url or "")
                if recorded is None and self._leading:
                    recorded = await self._take_into_use(engine, installation)
                if recorded == installation:
                    first = await self._copied_from(engine)
                if recorded == installation and first is None and self._leading and not readable:
                    readable = await self._let_read(engine)
            except (StoreUnavailable, KubeError) as error:
                _say_trouble(store, str(error)[:256])
                if not store.foreign.is_set():
                    store.candid.set()
                await asyncio.sleep(wait_s)
                wait_s = min(settings.backoff_max_s, wait_s * 2)
                continue
            except SchemaTooNew as error:
                _say_trouble(store, str(error))
                await asyncio.sleep(settings.backoff_max_s)
                continue
            store.judge(foreign=recorded not in (None, installation) or first is not None)
            if recorded == installation and first is None:
                store.stranger = None
                _say_trouble(store, None)
                store.migrated.set()
                wait_s = settings.backoff_base_s
                await asyncio.sleep(settings.list_rest_s)
                continue
            store.stranger = (
                "the database knows no installation: whoever leads makes it this one's"
                if recorded is None
                else f"the database belongs to cluster {first}, and this is a copy of it: this replica takes"
                " no duties, nothing is rented and nothing destroyed from here; if that cluster is no more:"
                " nebula hold release --yes"
                if first is not None
                else f"the database is of installation {recorded}, the cluster's Secret says {installation}:"
                " this replica takes no duties, nothing is rented and nothing destroyed from here; give it"
                " this installation's --database-url"
            )
            _say_trouble(store, store.stranger, say=log.info if recorded is None else log.error)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._elected.wait()
            self._elected.clear()
            wait_s = min(settings.backoff_max_s, wait_s * 2)

    async def _let_read(self, engine: AsyncEngine) -> bool:
        """Give the reports to the role that was named for them; False: try again.

        There is no such role, or Postgres refuses: somebody else does the same at this moment, say, or a
        right of ours is missing.
        """
        role = self._settings.report_role or ""
        try:
            async with begin(engine) as conn:
                await conn.run_sync(let_read, role)
        except NoSuchRole:
            log.warning("the database has no such role, so nobody can read the reports", report_role=role)
            return False
        except DBAPIError as error:
            log.warning(
                "the reports cannot be given to their role yet", report_role=role, error=str(error.orig)[:256]
            )
            return False
        return True

    async def _recorded(self, engine: AsyncEngine) -> str | None:
        """The id that the database carries, None if it knows of no installation.

        Nothing is changed by asking: somebody else's database is not even migrated.
        """
        try:
            async with begin(engine) as conn:
                return await id_of(conn)
        except StoreUnavailable as error:
            if error.sqlstate == "42P01":  # there are no tables
                return None
            raise

    async def _copied_from(self, engine: AsyncEngine) -> str | None:
        """The uid of the cluster that our database is of, if that is not this one; sweeps are held then.

        Its Secret and its database were copied, and maybe not its claims: rentals would be released for the
        want of them, whose machines serve the first cluster. An API server that does not tell says nothing.
        """
        try:
            if self._cluster_uid is None:
                found = await self._kube.get(paths.namespace("kube-system"))
                self._cluster_uid = str(found["metadata"]["uid"])
        except KubeError as error:
            log.warning("which cluster this is cannot be told", error=str(error)[:256])
            return None
        async with begin(engine) as conn:
            first = await cluster_of(conn)
            if first is None or first == self._cluster_uid:
                return None
            await hold(conn, f"this is cluster {self._cluster_uid}, the store is of cluster {first}: a copy?")
        return first

    async def _take_into_use(self, engine: AsyncEngine, installation: str) -> str:
        """Give an empty database our id, and return the one that it has then. For the leader alone: a replica
        that stands by may have been given the wrong one.

        Where claims were marked already, an empty database is one that has lost its rows: sweeps are held.
        """
        remembered, highest = await self._marked_claims(installation)
        async with begin(engine) as conn:
            made = await get_or_create(conn, new_id=installation)
            if remembered and made.id == installation:
                reason = f"the database was empty, and {len(remembered)} NodeClaims had been rented for"
                await hold(conn, f"{reason}, {remembered[0]} among them", sequence=highest)
                log.error("the database was empty: sweeps are held", claims=len(remembered))
        return made.id

    async def _marked_claims(self, installation: str) -> tuple[list[str], int]:
        """The names of this installation's claims that have a mark, and the highest of the marks."""
        of_ours = f"{keys.INSTALLATION_LABEL}={installation}"
        marked = {
            claim["metadata"]["name"]: mark
            async for page in self._kube.list_pages(paths.nodeclaims(), labelSelector=of_ours)
            for claim in page["items"]
            if (mark := _marked(claim))
        }
        return list(marked), max(marked.values(), default=0)

    # --- what can be rented ---

    async def _follow_offers(self, accounts: Accounts) -> None:
        """Open the accounts, and keep what each of them offers up to date."""
        opened: asyncio.Queue[Account] = asyncio.Queue()
        accounts.on_open(opened.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(accounts.run(), name="accounts")
            while True:
                account = await opened.get()
                tasks.create_task(self._follow(account), name=f"offers-{account.name}")

    async def _follow(self, account: Account) -> None:
        await follow(
            self._offerings,
            provider=account.provider,
            account=account.account,
            written=self._catalogue.of(account.adapter),
            turn=lambda: account.budget.take(Urgency.LIST),
            every_s=self._settings.offers_every_s,
        )

    # --- leading ---

    async def _elect(
        self, engine: AsyncEngine, installation: str, accounts: Accounts, admission: Admission
    ) -> None:
        """Stand for election for as long as the database is not seen to be another installation's."""
        store = self._store
        with suppress(TimeoutError):  # one that does not answer is no reason against leading
            async with asyncio.timeout(FIRST_LOOK_S):
                await store.candid.wait()
        while True:
            if store.foreign.is_set():
                await store.candid.wait()
            standing = asyncio.create_task(
                self._stand(engine, installation, accounts, admission), name="candidate"
            )
            foreign = asyncio.create_task(store.foreign.wait(), name="foreign database")
            try:
                await asyncio.wait({standing, foreign}, return_when=asyncio.FIRST_COMPLETED)
                if standing.done():
                    return standing.result()
            finally:
                for task in (standing, foreign):
                    task.cancel()
                await asyncio.wait({standing, foreign})
            log.error("the database became another installation's: all duties stop")

    async def _stand(
        self, engine: AsyncEngine, installation: str, accounts: Accounts, admission: Admission
    ) -> None:
        settings = self._settings
        election = Election(
            self._kube,
            namespace=settings.namespace,
            name=keys.LEASE_NAME,
            identity=self._identity(),
            duration_s=settings.lease_duration_s,
            deadline_s=settings.lease_deadline_s,
            renew_s=settings.lease_renew_s,
            overdue=_end_at_once,
        )

        async def lead(term: Term) -> None:
            self._leading = True
            self._elected.set()
            log.info("leading", epoch=term.epoch)
            try:
                with accounts.listeners_of_a_term(), self._offerings.listeners_of_a_term():
                    await self._lead(term, engine, installation, accounts, admission)
            finally:
                self._leading = False
                log.info("not leading any more")

        await election.run(lead)

    def _identity(self) -> str:
        return self._settings.identity or f"{socket.gethostname()}-{os.getpid()}"

    async def _lead(
        self, term: Term, engine: AsyncEngine, installation: str, accounts: Accounts, admission: Admission
    ) -> None:
        """The duties of one term."""
        settings, kube, offerings = self._settings, self._kube, self._offerings
        leadership = TermLeadership(term, self._store)
        pods = Cache(kube.room("cache"), paths.pods(), label_selector=_OPTED_IN)
        pools = Cache(kube.room("cache"), paths.nodepools())
        claims = Cache(kube.room("cache"), paths.nodeclaims())
        bindings = Cache(kube.room("cache"), paths.cloudpodbindings())
        nodes = Cache(kube.room("cache"), paths.nodes(), label_selector=_OUR_NODES)
        namespaces = Cache(kube.room("cache"), paths.namespaces())
        events = Recorder(kube.room("events"), now=kube.now)
        provisioning = Provisioning(
            accounts=accounts,
            offerings=offerings,
            engine=engine,
            settings=settings,
            installation=installation,
            leadership=leadership,
            port=ClaimDoor(kube.room("provisioning")),
            shown=lambda uid: claims.by_uid(uid) is not None,
            clock=boot_clock,
        )
        claims.on_change(lambda _old, new: provisioning.note_mark(_marked(new)))
        mirror = Mirror(engine=engine, claims=claims, bindings=bindings)
        placement = Placement(
            kube=kube,
            pods=pods,
            pools=pools,
            claims=claims,
            nodes=nodes,
            namespaces=namespaces,
            engine=engine,
            offerings=offerings,
            provisioning=provisioning,
            settings=settings,
            installation=installation,
            term=leadership,
            events=events,
            market=Adapters(accounts),
            now=kube.now,
        )
        binder = Bindings(
            kube=kube,
            claims=claims,
            bindings=bindings,
            settings=settings,
            installation=installation,
            term=leadership,
        )
        claim_keeper = Claims(
            kube=kube,
            claims=claims,
            bindings=bindings,
            pods=pods,
            pools=pools,
            provisioning=provisioning,
            accounts_names=accounts.names,
            settings=settings,
            events=events,
            now=kube.now,
        )
        vnodes = VirtualNodes(
            kube=kube,
            pods=pods,
            claims=claims,
            pools=pools,
            provisioning=provisioning,
            accounts=accounts,
            settings=settings,
            events=events,
            installation=installation,
            now=kube.now,
            clock=boot_clock,
        )
        ledger = Ledger(
            engine=engine,
            accounts=accounts,
            offerings=offerings,
            settings=settings,
            installation=installation,
            leadership=leadership,
            budgets=Budgets(
                engine=engine,
                kube=kube.room("budgets"),
                pools=pools,
                claims=claims,
                events=events,
                look_ahead_s=settings.budget_look_ahead_s,
            ),
        )
        sweeper = Sweeper(
            kube=kube,
            claims=claims,
            pods=pods,
            pools=pools,
            accounts=accounts,
            provisioning=provisioning,
            engine=engine,
            settings=settings,
            installation=installation,
            leadership=leadership,
            events=events,
            leader=self._identity(),
            clock=boot_clock,
        )
        caches = (pods, pools, claims, bindings, nodes, namespaces)
        with self._watches.of_a_term(caches):
            async with asyncio.TaskGroup() as duties:
                tasks = [
                    duties.create_task(work, name=name)
                    for name, work in (
                        ("epoch", self._settle_epoch(term, leadership, engine)),
                        *((f"watch {cache.path}", cache.run()) for cache in caches),
                        ("events", events.run()),
                        ("provisioning", provisioning.run()),
                        ("mirror", self._once_migrated(mirror.run)),
                        ("upkeep", self._once_migrated(Upkeep(engine).run)),
                        ("ledger", self._once_migrated(ledger.run)),
                        ("sweep", self._once_migrated(sweeper.run)),
                        ("vnode", vnodes.run()),
                        ("claims", claim_keeper.run()),
                        ("bindings", self._once_migrated(binder.run)),
                        ("placement", self._place(placement, accounts, offerings, nodes)),
                        # Not before: one that was started with the wrong database must not draw the webhooks
                        # to itself.
                        ("webhook configurations", self._once_migrated(admission.keep)),
                    )
                ]
                await watch_over(tasks)

    async def _once_migrated(self, duty: Callable[[], Awaitable[None]]) -> None:
        """What has nothing to do before the database was seen to be ours."""
        await self._store.migrated.wait()
        await duty()

    async def _place(
        self, placement: Placement, accounts: Accounts, offerings: Offerings, nodes: Cache
    ) -> None:
        """Begin to place once the clouds that answer are known with their offers and nodes.

        Else the first Pods of a term would go to whichever cloud answered first, not to the one that their
        pool names first.
        """

        def known() -> bool:
            return all(
                bool((offers := offerings.get(*account.key)) and offers.offerings)
                and _is_ready(nodes.get("", keys.node_name(*account.key)))
                for account in accounts
            )

        changed = asyncio.Event()
        offerings.on_change(lambda _: changed.set())
        nodes.on_change(lambda _old, _new: changed.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(START_GRACE_S):
                await self._store.migrated.wait()
                await accounts.tried()
                while not known():
                    changed.clear()
                    await changed.wait()
        await placement.run()

    async def _settle_epoch(self, term: Term, leadership: TermLeadership, engine: AsyncEngine) -> None:
        """Write one epoch, above every earlier one, to the Lease and to the store; then renting may begin.

        The store may lose it later (it was restored, or a former leader wrote late): then it is done again.
        Or it carries it, and is not the store that it was: it was restored to a moment of this very term.
        That is met in the same way, so that nothing goes on by what was remembered of rows that are lost.
        """
        while True:
            await self._store.migrated.wait()
            settled_in = await self._settle_once(term, leadership, engine)
            while True:
                await asyncio.sleep(self._settings.list_rest_s)
                if not await self._is_the_same(engine, leadership.epoch, settled_in):
                    break
            log.warning("the store carries another epoch than ours, or is another", ours=leadership.epoch)
            leadership.unsettle()

    async def _is_the_same(self, engine: AsyncEngine, epoch: int | None, settled_in: str) -> bool:
        """Whether it is that store, with our epoch; a store that is away is believed until it is back."""
        try:
            async with begin(engine) as conn:
                found, now_in = await epoch_of(conn), await lineage(conn)
        except StoreUnavailable:
            return True
        return found == epoch and now_in == settled_in

    async def _settle_once(self, term: Term, leadership: TermLeadership, engine: AsyncEngine) -> str:
        """The lineage of the store in which our epoch stands."""
        wait_s = self._settings.backoff_base_s
        epoch: int | None = None
        settled_in = ""
        while True:
            try:
                if epoch is None:
                    async with begin(engine) as conn:
                        settled_in = await lineage(conn)
                        epoch = await next_epoch(conn, term.epoch)
                raised = await term.raise_epoch(epoch)
                if raised != epoch:
                    async with begin(engine) as conn:
                        settled_in = await lineage(conn)
                        epoch = await set_epoch_at_least(conn, raised)
                    continue
            except (StoreUnavailable, NotInstalled, KubeError) as error:  # its row may be about to be made
                log.warning("the epoch is not settled yet", error=str(error)[:256])
                await asyncio.sleep(wait_s)
                wait_s = min(self._settings.backoff_max_s, wait_s * 2)
            except TermOver:
                await asyncio.Event().wait()  # the duties are about to be cancelled
            else:
                leadership.settle(epoch)
                log.info("epoch settled", epoch=epoch)
                return settled_in


def _is_ready(node: Obj | None) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _marked(claim: Obj | None) -> int:
    """The sequence of a NodeClaim's mark; 0 without one."""
    attempt = (claim or {}).get("status", {}).get("attempt") or {}
    return int(attempt.get("sequence", 0))


def _say_trouble(store: Store, trouble: str | None, *, say: Callable[..., Any] = log.warning) -> None:
    """Log a change once, not each look."""
    if trouble != store.trouble:
        store.trouble = trouble
        if trouble is None:
            log.info("store ready")
        else:
            say("store not usable", why=trouble)


def _decoded(text: str) -> str:
    return b64decode(text).decode()


def _end_at_once() -> None:
    """Duties that outlived their Lease must not go on beside a new leader's."""
    log.critical("duties have not stopped in time: ending the process")
    os._exit(70)


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    try:
        yield
    finally:
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)
