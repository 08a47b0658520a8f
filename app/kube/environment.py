"""Reads what a Pod's container refers to, right before a machine is asked for, and composes it.

Reads go to the API server and to no cache: a cold or late cache would call a Secret absent that is there, or
give an old value. Each object is read once a call, whatever the number of references; absence is remembered
for that call, a failed read for none: it is the call's end. Nothing that was read outlives the call but the
workload made of it. Only ``get`` is used: watching Secrets needs the right to list them all.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.api.reasons import PodEvent
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError
from app.workload import registries
from app.workload.environment import Environment, Kind, Source, Unresolved, compose, sources
from providers.base import RegistryLogin


class UnreadableLogin(Unresolved):
    """An image pull Secret is there and cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A Warning Event that a kubelet would record, too."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the container gets beside its spec; values and passwords are in no ``repr``."""

    environment: Environment
    registry: RegistryLogin | None = None
    notes: tuple[Note, ...] = ()


async def resolve(kube: Kube, pod: Obj, *, node: str) -> Resolved:
    """Environment and registry login of the Pod's first container, on the virtual node called ``node``.

    Raises:
        Unresolved: something required is absent, cannot be read now, or is unusable. Try again later.
    """
    container = pod["spec"]["containers"][0]
    namespace = pod["metadata"]["namespace"]
    logins = [each["name"] for each in pod["spec"].get("imagePullSecrets") or () if each.get("name")]
    wanted = sources(container)
    pulls = tuple(dict.fromkeys(Source(Kind.SECRET, name) for name in logins))
    objects = await _read(kube, namespace, tuple(dict.fromkeys((*wanted, *pulls))))
    made = compose(pod, container, objects, node=node)
    registry, notes = _login(container["image"], namespace, {each.name: objects[each] for each in pulls})
    skipped = (Note(reason=PodEvent.INVALID_NAMES, message=text) for text in made.skipped)
    return Resolved(environment=made, registry=registry, notes=(*skipped, *notes))


async def _read(kube: Kube, namespace: str, wanted: tuple[Source, ...]) -> dict[Source, Obj | None]:
    found = await asyncio.gather(*(_get(kube, namespace, source) for source in wanted))
    return dict(zip(wanted, found, strict=True))


async def _get(kube: Kube, namespace: str, source: Source) -> Obj | None:
    path = paths.secret if source.kind is Kind.SECRET else paths.configmap
    try:
        return await kube.find(path(namespace, source.name))
    except ValueError as error:
        raise Unresolved(f"{source.kind} without a usable name: {error}") from error
    except KubeError as error:
        raise Unresolved(f"{source.kind} {namespace}/{source.name} cannot be read: {error}") from error


def _login(
    image: str, namespace: str, secrets: Mapping[str, Mapping[str, Any] | None]
) -> tuple[RegistryLogin | None, list[Note]]:
    """The login for the image. A missing Secret is only told of, as on a node: the image may be public."""
    known: list[registries.Entry] = []
    missing = []
    for name, secret in secrets.items():
        if secret is None:
            missing.append(name)
            continue
        try:
            known += registries.entries(secret)
        except registries.BadPullSecret as error:
            raise UnreadableLogin(f"Secret {namespace}/{name} {error}") from None
    notes = []
    if missing:
        message = (
            f"Unable to retrieve some image pull secrets ({', '.join(missing)});"
            " attempting to pull the image may not succeed."
        )
        notes.append(Note(reason=PodEvent.NO_PULL_SECRET, message=message))
    return registries.login_for(image, known), notes
