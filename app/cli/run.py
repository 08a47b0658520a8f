"""``nebula run``: one replica. Its options are the fields of `app.settings.Settings`, made from them."""

import asyncio
import importlib
import os
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from app.settings import Settings, SettingsError, entries_text, flag_of, load

if TYPE_CHECKING:
    from app.kube.client import Kube


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, field in reversed(Settings.model_fields.items()):
        shown = field.description or ""
        kind: Any = str
        if field.annotation is bool:
            option = click.option(
                f"{flag_of(name)}/--no-{name.replace('_', '-')}", name, default=None, help=shown
            )
        else:
            choices = _choices(field.annotation)
            if choices:
                kind = click.Choice(choices)
            default = field.get_default()
            if default is not None and default != () and not shown.endswith("."):
                shown += "."
            if default is not None and default != ():
                shown += f" [{default}]"
            option = click.option(
                flag_of(name), name, type=kind, metavar=None if choices else "VALUE", help=shown
            )
        command = option(command)
    return command


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if isinstance(annotation, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


@click.command("run")
@_with_settings
def command(**flags: Any) -> None:
    """Run one replica: webhooks always, controllers while it leads.

    Each option is also a variable: --lease-renew-s is NEBULA_LEASE_RENEW_S. A flag wins.
    """
    try:
        settings = load(flags, os.environ)
        errors = _check(settings)
    except SettingsError as error:
        errors = error.errors
    if errors:
        raise click.UsageError("these options cannot be used:\n" + "\n".join(f"  {line}" for line in errors))

    _leave_rich_out()
    from app.telemetry import logs

    logs.configure(level=settings.log_level, style=settings.log_format)
    with ExitStack() as stack:
        if settings.dev:
            from app.dev import NotBroughtUp, bring_up

            try:
                settings = stack.enter_context(bring_up(settings))
            except NotBroughtUp as error:
                raise click.ClickException(str(error)) from None
        from app.inventory.accounts import BadOptions

        try:
            asyncio.run(_run(settings))
        except* click.ClickException as refused:
            raise _first(refused) from None
        except* BadOptions as refused:
            raise click.UsageError(str(_first(refused))) from None
        except* OSError as refused:  # an address that somebody else listens on
            raise click.ClickException(str(_first(refused))) from None
        except* Exception as failures:
            import structlog

            # A duty that failed in a way nobody foresaw: end, and begin again with nothing remembered.
            structlog.get_logger().critical("the replica ends", exc_info=failures)
            raise SystemExit(1) from None


def _leave_rich_out() -> None:
    """structlog loads rich, where it is installed, for tracebacks that a replica never prints: 3 MiB."""
    if "rich" not in sys.modules and "structlog" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            importlib.import_module("structlog")
        finally:
            del sys.modules["rich"]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _check(settings: Settings) -> list[str]:
    """What no field can check alone."""
    from app.inventory.accounts import check_adapters, installed_adapters
    from catalog.catalogue import BadCatalogue, load

    errors = check_adapters(settings.providers)
    try:
        load(settings.catalog_dir, adapters=installed_adapters())
    except BadCatalogue as error:
        errors += error.errors
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    if settings.dev and in_cluster:
        errors.append("--dev: never in a cluster; give --database-url and --providers")
    if not settings.dev and settings.database_url is None:
        errors.append("--database-url: required (NEBULA_DATABASE_URL); --dev brings a database of its own")
    return errors


async def _run(settings: Settings) -> None:
    import asyncio.sslproto
    from typing import cast

    from app.kube.auth import NoCluster
    from app.kube.client import Kube
    from app.kube.errors import KubeError
    from app.manager import Replica

    # The API server opens up to a hundred webhook connections in a burst, and each would hold 256 KiB.
    cast(Any, asyncio.sslproto.SSLProtocol).max_size = 32 * 1024
    try:
        kube = await Kube.connect(kubeconfig=settings.kubeconfig)
    except NoCluster as error:
        raise click.ClickException(f"--kubeconfig: {error}") from None
    async with kube:
        try:
            if settings.dev:
                from app.dev import NotBroughtUp, check_folder, prepare_cluster

                try:
                    await prepare_cluster(kube, settings.namespace)
                    await check_folder(kube, settings)
                except NotBroughtUp as error:
                    raise click.ClickException(str(error)) from None
            await _check_cluster(kube, settings)
            if settings.dev:
                # What the other commands need in another terminal. Not before our kinds are served: whoever
                # sees these lines goes on with `kubectl apply`.
                click.echo(f"export NEBULA_DATABASE_URL='{settings.database_url}'")
                click.echo(f"export NEBULA_PROVIDERS='{entries_text(settings.providers)}'")
        except KubeError as error:
            hint = "; does --kubeconfig (KUBECONFIG) name the right cluster?" if error.status == 0 else ""
            raise click.ClickException(
                f"the API server at {kube.server} cannot be used: {error}{hint}"
            ) from None
        await Replica(settings, kube=kube).run()


async def _check_cluster(kube: "Kube", settings: Settings) -> None:
    """What would keep every Pod gated, said before anything starts."""
    from app.kube import paths
    from app.kube.preflight import missing_kinds, missing_rights
    from app.kube.webhooks import other_installation

    problems = []
    if rights := await missing_rights(kube, namespace=settings.namespace):
        lines = "".join(f"\n  {line}" for line in rights)
        problems.append(
            f"we may not do what Nebula has to; give our user or ServiceAccount the rights to:{lines}"
        )
    elif await kube.find(paths.namespace(settings.namespace)) is None:
        problems.append(f"namespace {settings.namespace} does not exist: create it, or give --namespace")
    if kinds := await missing_kinds(kube):
        problems.append(
            f"the cluster does not know {', '.join(kinds)}: kubectl apply -f crds/, or start with --dev"
        )
    if not rights and (other := await other_installation(kube, namespace=settings.namespace)):
        problems.append(other)
    if settings.kubelet_address is not None and not rights:
        import ssl

        from app.kubelet.callers import ClientAuthority, NobodyKnown

        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            await ClientAuthority(kube, trial, file=settings.kubelet_client_ca_file).load()
        except NobodyKnown as error:
            problems.append(str(error))
    if problems:
        raise click.ClickException("\n".join(problems))
