"""What the schema of a NodePool describes and this version does not act on yet: refused, never ignored.

An ignored limit spends money. So the one table here is checked twice: by the API server, as CEL rules that
`app.api.crds` puts into the CRD, and by `refusals`, for a pool that was stored before the rule was (a newer
version's pool after a rollback, or CRDs that nobody updated). Building a room means deleting its row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic.config import JsonDict

from app.api.keys import REGIONS_ANNOTATION
from app.api.model import rule

EACH: Final = "*"  # in a path: every entry of the list


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBuilt:
    """One field, from ``spec`` down, and what of it is accepted: these values, or nothing at all."""

    path: tuple[str, ...]
    why: str
    accepted: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """What a client is told: the field, that it is not supported, why not ignored, and the way out."""
        names = ".".join(self.path).replace(f".{EACH}", "[]")
        if not self.accepted:
            return f"spec.{names} is not supported by this version of Nebula: {self.why}; remove it"
        values = " or ".join(self.accepted)
        return f"spec.{names} other than {values} is not supported by this version of Nebula: {self.why}"

    @property
    def cel(self) -> JsonDict:
        """The rule for the schema of the object that holds the field."""
        name = self.path[-1]
        holds = f"!has(self.{name})"
        if self.accepted:
            values = ", ".join(f"'{value}'" for value in self.accepted)
            holds = f"{holds} || self.{name} in [{values}]"
        return rule(holds, self.message, fieldPath=f".{name}", reason="FieldValueForbidden")

    def broken_by(self, spec: Mapping[str, Any]) -> bool:
        """Whether this spec, as plain JSON, carries the field with a value that is not accepted."""
        return any(value not in self.accepted for value in _values(spec, self.path))


NOT_BUILT: Final = (
    NotBuilt(
        path=("providers", EACH, "account"), accepted=("default",), why="another account would be charged"
    ),
    NotBuilt(
        path=("egress", "mode"), accepted=("Open",), why="the workload would run without the restriction"
    ),
)
"""The rows of NodePool, each a field from ``spec`` down."""

POD_ANNOTATIONS_NOT_BUILT: Final[Mapping[str, str]] = {
    REGIONS_ANNOTATION: "an ignored restriction would rent in another region",
}
"""Annotations of a Pod that admission refuses until their room exists, with the reason."""


def refusals(obj: Mapping[str, Any]) -> tuple[str, ...]:
    """Why this NodePool, as plain JSON, must not be placed from: one message a field. Empty when it may."""
    spec = obj.get("spec") or {}
    return tuple(row.message for row in NOT_BUILT if row.broken_by(spec))


def annotation_refusals(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Why a Pod with these annotations must be refused. Empty when it may be admitted."""
    return tuple(
        f"annotation {key} is not supported by this version of Nebula: {why}; remove it"
        for key, why in POD_ANNOTATIONS_NOT_BUILT.items()
        if key in annotations
    )


def _values(node: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Every value at the path; nothing where the field is absent."""
    if not path:
        yield node
        return
    name, rest = path[0], path[1:]
    if name == EACH:
        for entry in node if isinstance(node, list) else ():
            yield from _values(entry, rest)
    elif isinstance(node, Mapping) and node.get(name) is not None:
        yield from _values(node[name], rest)
