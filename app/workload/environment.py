"""A container's environment as a kubelet would compose it, from objects that somebody else has read. Pure.

``envFrom`` in order with prefixes, then ``env`` in order over it; ``$(NAME)`` in a literal value sees what
came before it; a value from an object or a field is not expanded. ``optional`` forgives absence and nothing
else. Variables for Services are never added: a rented machine cannot reach a cluster's addresses.

Invariants: what is wrong raises, so that there is never half an environment; no value is in any error, nor in
the ``repr`` of anything here; which variables hold a Secret's content is known to the last.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import Any, Final

from app.api.quantities import parse_quantity
from app.workload.expansion import expand, referenced


class Kind(StrEnum):
    """The kinds that an environment may be read from."""

    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """One object of the Pod's own namespace."""

    kind: Kind
    name: str


class Unresolved(Exception):
    """Something that the Pod needs is not there (yet). The message names kind, namespace, name and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``secret`` names the variables that hold content of a Secret, also by way of a reference.

    ``skipped``: sentences about keys that can be no variable, for an Event.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


FIELDS: Final = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
)
"""What a ``fieldRef`` may name, beside one label or one annotation."""

_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_AMOUNTS: Final = ("cpu", "memory", "ephemeral-storage")
_SOURCES: Final = {
    "configMapRef": Kind.CONFIG_MAP,
    "secretRef": Kind.SECRET,
    "configMapKeyRef": Kind.CONFIG_MAP,
    "secretKeyRef": Kind.SECRET,
}


def sources(container: Mapping[str, Any]) -> tuple[Source, ...]:
    """Every object that the container's environment refers to, once, in the order of reference."""
    return tuple(dict.fromkeys(source for source, _ in _references(container)))


def compose(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    objects: Mapping[Source, Mapping[str, Any] | None],
    *,
    node: str = "",
) -> Environment:
    """The environment, where ``objects`` has each of `sources`: None for one that does not exist.

    ``node`` is the virtual node's name, which an unbound Pod does not carry yet.

    Raises:
        Unresolved: a required object or key is absent, or a value cannot be an environment variable.
    """
    namespace = pod["metadata"]["namespace"]
    variables: dict[str, str] = {}
    secret: set[str] = set()
    skipped: list[str] = []

    def put(name: str, value: str, *, hidden: bool) -> None:
        variables[name] = value
        (secret.add if hidden else secret.discard)(name)

    for entry in container.get("envFrom") or ():
        source, optional = _source_of(entry)
        held = _held(objects, source, namespace, optional=optional)
        prefix, bad = entry.get("prefix") or "", []
        for key in sorted((held or {}).get("data") or {}):
            if not _VARIABLE.fullmatch(prefix + key):
                bad.append(prefix + key)
                continue
            value = _value(source, held or {}, key, namespace)
            put(prefix + key, value, hidden=source.kind is Kind.SECRET)
        if bad:
            skipped.append(
                f"Keys [{', '.join(bad)}] from the EnvFrom {source.kind.lower()} {namespace}/{source.name}"
                " were skipped since they are considered invalid environment variable names."
            )
    for entry in container.get("env") or ():
        name, literal, origin = entry["name"], entry.get("value") or "", entry.get("valueFrom")
        if literal or not origin:
            hidden = bool(referenced(literal) & secret)
            put(name, expand(literal, variables), hidden=hidden)
        elif (told := origin.get("fieldRef")) is not None:
            put(name, _field(pod, told["fieldPath"], node=node), hidden=False)
        elif (told := origin.get("resourceFieldRef")) is not None:
            put(name, _amount(pod, container, told), hidden=False)
        else:
            source, optional = _source_of(origin)
            key = next(iter(origin.values()))["key"]
            held = _held(objects, source, namespace, optional=optional)
            if held is None:
                continue
            if key not in (held.get("data") or {}):
                if optional:
                    continue
                raise Unresolved(f"couldn't find key {key} in {source.kind} {namespace}/{source.name}")
            value = _value(source, held, key, namespace)
            put(name, value, hidden=source.kind is Kind.SECRET)
    return Environment(variables=variables, secret=tuple(sorted(secret)), skipped=tuple(skipped))


def refusals(pod: Mapping[str, Any], container: Mapping[str, Any], field: str) -> Iterator[tuple[str, str]]:
    """What no object that appears later can mend: the path of the field, and the rest of the sentence."""
    for entry in container.get("env") or ():
        path = f"{field}.env[{entry.get('name')}].valueFrom"
        origin = entry.get("valueFrom") or {}
        if entry.get("value"):
            continue
        if (told := origin.get("fieldRef")) is not None:
            where = told.get("fieldPath", "")
            if (told.get("apiVersion") or "v1") != "v1":
                yield f"{path}.fieldRef.apiVersion", "must be v1"
            elif where.startswith("status."):
                yield (
                    f"{path}.fieldRef",
                    f"cannot be {where}: a rented machine's address is not known before it runs; remove it",
                )
            elif where not in FIELDS and not _KEYED_FIELD.fullmatch(where):
                known = ", ".join((*FIELDS, "metadata.labels['KEY']", "metadata.annotations['KEY']"))
                yield f"{path}.fieldRef", f"cannot be {where}: only {known}; remove it"
        elif (told := origin.get("resourceFieldRef")) is not None:
            if (why := _no_amount(pod, container, told)) is not None:
                yield f"{path}.resourceFieldRef", why
        elif origin and not origin.keys() & _SOURCES.keys():
            kind = next(iter(origin))
            yield (
                f"{path}.{kind}",
                "is not supported by this version of Nebula: the variable would be missing; remove it",
            )


def _references(container: Mapping[str, Any]) -> Iterator[tuple[Source, bool]]:
    for entry in container.get("envFrom") or ():
        yield _source_of(entry)
    for entry in container.get("env") or ():
        origin = entry.get("valueFrom") or {}
        if not entry.get("value") and origin.keys() & _SOURCES.keys():
            yield _source_of(origin)


def _source_of(entry: Mapping[str, Any]) -> tuple[Source, bool]:
    """The object that an entry refers to, and whether it may be absent."""
    name = next(key for key in _SOURCES if key in entry)
    reference = entry[name]
    return Source(_SOURCES[name], reference.get("name") or ""), bool(reference.get("optional"))


def _held(
    objects: Mapping[Source, Mapping[str, Any] | None], source: Source, namespace: str, *, optional: bool
) -> Mapping[str, Any] | None:
    held = objects[source]
    if held is None and not optional:
        raise Unresolved(f'{source.kind.lower()} "{source.name}" not found in namespace "{namespace}"')
    return held


def _value(source: Source, held: Mapping[str, Any], key: str, namespace: str) -> str:
    value = held["data"][key]
    where = f"key {key} in {source.kind} {namespace}/{source.name}"
    if source.kind is Kind.SECRET:
        try:
            value = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError):
            # Without the cause: it would carry the bytes.
            raise Unresolved(f"{where} is no UTF-8 text, and cannot be an environment variable") from None
    if "\0" in value:
        raise Unresolved(f"{where} holds a zero byte, and cannot be an environment variable")
    return str(value)


def _field(pod: Mapping[str, Any], path: str, *, node: str) -> str:
    """An absent label or annotation is an empty text, as on a node."""
    metadata, spec = pod["metadata"], pod["spec"]
    if (keyed := _KEYED_FIELD.fullmatch(path)) is not None:
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    match path:
        case "spec.nodeName":
            return str(spec.get("nodeName") or node)
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName") or "default")
        case _:
            return str(metadata[path.removeprefix("metadata.")])


def _amount(pod: Mapping[str, Any], container: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """A limit or request, in whole divisors, rounded up. A request that is not set is 0, as on a node."""
    part, _, name = str(told["resource"]).partition(".")
    text = _asked(pod, container, told).get(part, {}).get(name, "0")
    divisor = parse_quantity(told.get("divisor") or "1") or Decimal(1)
    return str(int((parse_quantity(text) / divisor).to_integral_value(rounding=ROUND_CEILING)))


def _no_amount(pod: Mapping[str, Any], container: Mapping[str, Any], told: Mapping[str, Any]) -> str | None:
    part, _, name = str(told.get("resource", "")).partition(".")
    if part not in ("limits", "requests") or name not in _AMOUNTS:
        known = ", ".join(f"{each}.{amount}" for each in ("limits", "requests") for amount in _AMOUNTS)
        return f"cannot be {told.get('resource')}: only {known}; remove it"
    try:
        asked = _asked(pod, container, told)
        if part == "limits" and not parse_quantity(asked.get(part, {}).get(name) or "0"):
            return (
                f"names {told['resource']}, which is not set: a node's capacity would stand in for it, and a"
                " virtual node's says nothing of the machine; set the limit, or remove it"
            )
        parse_quantity(told.get("divisor") or "1")
    except ValueError as error:
        return f"cannot be read: {error}"
    return None


def _asked(
    pod: Mapping[str, Any], container: Mapping[str, Any], told: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """The resources of the container that is named, by default the variable's own.

    Raises:
        ValueError: there is none of that name.
    """
    wanted = told.get("containerName") or container.get("name")
    spec = pod["spec"]
    for each in (container, *(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        if each.get("name") == wanted:
            resources = each.get("resources") or {}
            return {part: resources.get(part) or {} for part in ("limits", "requests")}
    raise ValueError(f"there is no container {wanted!r}")
