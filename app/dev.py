"""What ``nebula run --dev`` brings along: an embedded Postgres, a fake cloud, the CRDs and the namespace.

For somebody's laptop and for tests; `app.cli.run` refuses it inside a cluster.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import orjson
import structlog

from app import processes
from app.api.crds import load_crds
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import Exists
from app.kube.installation import installation_of
from app.kube.preflight import missing_kinds
from app.settings import ProviderEntry, Settings, entries_text
from app.store.devserver import DevPostgres, NoServer, NotStarted, default_data_dir
from app.store.engine import StoreUnavailable, connect, engine_of
from app.store.installation import get as recorded_in

log = structlog.get_logger()
CLOUD_START_S = 30.0
KINDS_SERVED_S = 30.0
LOOPBACK = "127.0.0.1"
TOLD = "exports.json"  # what the last start has said to export


class NotBroughtUp(RuntimeError):
    """A part could not be started; the message says which and why."""


def folder_of(settings: Settings) -> Path:
    """Where ``--dev`` keeps its database and its fake cloud."""
    return Path(settings.dev_dir) if settings.dev_dir else default_data_dir().parent


@contextmanager
def bring_up(settings: Settings) -> Iterator[Settings]:
    """Start what the settings do not name, and give the settings that name it; stop it all at the end.

    What an earlier start has told its shell to export names parts that went with it: it counts as not named.
    """
    folder = folder_of(settings)
    folder.mkdir(parents=True, exist_ok=True)
    changes: dict[str, object] = {}
    told = folder / TOLD
    earlier = orjson.loads(told.read_bytes()) if told.exists() else {}
    database = settings.database_url if settings.database_url != earlier.get("database_url") else None
    providers = settings.providers if entries_text(settings.providers) != earlier.get("providers") else ()
    with ExitStack() as stack:
        if database is None:
            try:
                server = stack.enter_context(DevPostgres(folder / "postgres", durable=True))
            except (NoServer, NotStarted) as error:
                raise NotBroughtUp(f"--dev-dir {folder}: {error}") from error
            changes["database_url"] = server.url
        if not providers:
            url = stack.enter_context(_fake_cloud(folder / "fake-cloud"))
            changes["providers"] = (
                ProviderEntry(name="fake", account="default", adapter="fake", options={"url": url}),
            )
        if settings.webhook_url is None:
            port = settings.webhook_bind.rpartition(":")[2]
            changes["webhook_url"] = f"https://127.0.0.1:{port}"
            if settings.kubelet_address is None:  # an API server that reaches the one reaches the other
                changes["kubelet_address"] = LOOPBACK
                changes["kubelet_bind"] = f"{LOOPBACK}:{settings.kubelet_bind.rpartition(':')[2]}"
        log.info("development", folder=str(folder), database="ours" if "database_url" in changes else "given")
        made = settings.model_copy(update=changes)
        ours: dict[str, str | None] = {}
        if "database_url" in changes:
            ours["database_url"] = made.database_url
        if "providers" in changes:
            ours["providers"] = entries_text(made.providers)
        told.write_bytes(orjson.dumps(ours))
        yield made


@contextmanager
def _fake_cloud(folder: Path) -> Iterator[str]:
    """A fake cloud as a process of its own, its state in ``folder``; its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "simulator.log"
    output.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "app.cli", "simulate", "fake", "--state", str(folder), "--port", "0"]
    child = processes.spawn(argv, log=output)
    try:
        yield _listening(child.poll, output)
    finally:
        processes.stop(child, grace_s=5)


def _listening(poll: Callable[[], int | None], output: Path) -> str:
    until = time.monotonic() + CLOUD_START_S
    while time.monotonic() < until:
        text = output.read_text() if output.exists() else ""
        for line in text.splitlines():
            if line.startswith("listening on "):
                return line.removeprefix("listening on ").strip()
        if poll() is not None:
            break
        time.sleep(0.05)
    raise NotBroughtUp(f"the fake cloud did not start:\n{processes.tail(output)}")


async def check_folder(kube: Kube, settings: Settings) -> None:
    """A database that an earlier cluster's controller has filled is of no use with this one.

    Raises:
        NotBroughtUp: it is of another installation than the cluster, or the cluster is of none yet.
    """
    engine = engine_of(settings)
    try:
        async with connect(engine) as conn:
            recorded = await recorded_in(conn)
    except StoreUnavailable:  # new, and without a table
        return
    finally:
        await engine.dispose()
    here = await installation_of(kube, namespace=settings.namespace)
    if recorded is not None and recorded.id != here:
        folder = folder_of(settings)
        raise NotBroughtUp(
            f"the database in {folder} is of another cluster's installation ({recorded.id}; this cluster's is"
            f" {here or 'not made yet'}): give --dev-dir another folder, or delete {folder}"
        )


async def prepare_cluster(kube: Kube, namespace: str) -> None:
    """Make the namespace, apply the CRDs of this version, and wait until they are served.

    Raises:
        NotBroughtUp: they were not served in time.
    """
    with suppress(Exists):
        body: Obj = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await kube.create(paths.namespaces(), body)
    for crd in load_crds():
        await kube.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
    until = time.monotonic() + KINDS_SERVED_S
    while missing := await missing_kinds(kube):
        if time.monotonic() > until:
            raise NotBroughtUp(f"the API server does not serve {', '.join(missing)}, which were just applied")
        await asyncio.sleep(0.1)
