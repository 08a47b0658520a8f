"""The CustomResourceDefinitions, made from the models. ``python -m app.api.crds`` writes them to ``crds/``.

Pydantic's JSON schema is not what the API server takes: references are inlined, null and titles go, the rules
of `app.api.not_built` are added, and the server's own parts (metadata) are left to it. The written files are
what is applied and shipped; ``--check`` (and a test) fails when they are not what the models say.
"""

import argparse
import copy
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic.json_schema import GenerateJsonSchema

from app.api.binding import CloudPodBinding
from app.api.keys import (
    CATEGORY,
    CLOUD_POD_BINDING,
    CLOUD_POD_BINDINGS,
    GROUP,
    NODE_CLAIM,
    NODE_CLAIMS,
    NODE_POOL,
    NODE_POOLS,
    VERSION,
)
from app.api.model import AGE, VALIDATIONS, Column, Resource
from app.api.nodeclaim import NodeClaim
from app.api.nodepool import NodePool
from app.api.not_built import EACH, NOT_BUILT, NotBuilt
from app.api.quantities import format_duration, format_money

Schema = dict[str, Any]

PACKAGE: Final = "crds"
_HEADER = "# Written by `python -m app.api.crds` from app/api; a test fails when it drifts.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """All that a CRD says besides its schema."""

    model: type[Resource]
    kind: str
    plural: str
    short_name: str
    scope: Literal["Cluster", "Namespaced"]
    columns: tuple[Column, ...]
    not_built: tuple[NotBuilt, ...] = ()

    @property
    def file_name(self) -> str:
        return f"{GROUP}_{self.plural}.yaml"


_READY = '.status.conditions[?(@.type=="Ready")].status'
_READY_REASON = '.status.conditions[?(@.type=="Ready")].reason'

KINDS: Final = (
    Kind(
        model=NodePool,
        kind=NODE_POOL,
        plural=NODE_POOLS,
        short_name="np",
        scope="Cluster",
        columns=(
            Column("Strategy", "string", ".spec.strategy"),
            Column("Providers", "string", ".status.providers"),
            Column("Ready", "string", _READY),
            AGE,
            Column("Reason", "string", _READY_REASON, wide=True),
            Column("Mode", "string", ".spec.failover.mode", wide=True),
            Column("Placed", "string", ".status.placed", wide=True),
            Column("GPUs", "integer", ".spec.limits.gpus", wide=True),
            Column("USD/h", "string", ".spec.limits.usdPerHour", wide=True),
            Column("MaxPrice", "string", ".spec.maxPrice", wide=True),
        ),
        not_built=NOT_BUILT,
    ),
    Kind(
        model=NodeClaim,
        kind=NODE_CLAIM,
        plural=NODE_CLAIMS,
        short_name="nc",
        scope="Cluster",
        columns=(
            Column("Provider", "string", ".spec.provider"),
            Column("Region", "string", ".spec.region"),
            Column("ACCELERATOR", "string", ".spec.accelerator"),
            Column("CAPACITY_TYPE", "string", ".spec.capacityType"),
            Column("Phase", "string", ".status.phase"),
            Column("Instance", "string", ".status.instanceID"),
            AGE,
            Column("Pool", "string", ".spec.poolRef", wide=True),
            Column("Namespace", "string", ".spec.podRef.namespace", wide=True),
            Column("Pod", "string", ".spec.podRef.name", wide=True),
            Column("Account", "string", ".spec.account", wide=True),
            Column("MaxPrice", "string", ".spec.maxPrice", wide=True),
            Column("Endpoint", "string", ".status.endpoint", wide=True),
        ),
    ),
    Kind(
        model=CloudPodBinding,
        kind=CLOUD_POD_BINDING,
        plural=CLOUD_POD_BINDINGS,
        short_name="cpb",
        scope="Namespaced",
        columns=(
            Column("Pod", "string", ".spec.podRef.name"),
            Column("Provider", "string", ".spec.provider"),
            Column("Region", "string", ".spec.region"),
            Column("Instance", "string", ".status.instanceID"),
            Column("Price/h", "string", ".status.pricePerHour"),
            Column("Ready", "string", _READY),
            AGE,
            Column("Phase", "string", ".status.phase", wide=True),
            Column("CAPACITY_TYPE", "string", ".spec.capacityType", wide=True),
            Column("Reason", "string", _READY_REASON, wide=True),
            Column("Endpoint", "string", ".status.endpoint", wide=True),
            Column("Claim", "string", ".spec.claimName", wide=True),
        ),
    ),
)


def load_crds() -> list[dict[str, Any]]:
    """The CRDs as shipped in the package, ready to be applied, in the order of `KINDS`."""
    folder = resources.files(PACKAGE)
    return [yaml.safe_load(folder.joinpath(each.file_name).read_text("utf-8")) for each in KINDS]


def generate(kind: Kind) -> dict[str, Any]:
    """The CRD of one kind, from its model."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short_name],
                "categories": [CATEGORY],
            },
            "scope": kind.scope,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": structural_schema(kind)},
                }
            ],
        },
    }


def _column(column: Column) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.json_path}
    return shown | {"priority": 1} if column.wide else shown


def structural_schema(kind: Kind) -> Schema:
    """The kind's schema in the form that the API server accepts as structural."""
    raw = kind.model.model_json_schema(by_alias=True, schema_generator=_Generator)
    schema = _structural(raw, raw.get("$defs", {}))
    schema["properties"] = {
        "apiVersion": {"type": "string", "description": "The group and version of this object's schema."},
        "kind": {"type": "string", "description": "The name of this object's schema."},
        "metadata": {"type": "object"},  # the API server's own; it allows no more here
        **{name: schema["properties"][name] for name in ("spec", "status")},
    }
    for row in kind.not_built:
        _refuse(schema, row)
    return _in_order(schema)


def render(kind: Kind) -> str:
    """The text of the kind's file in ``crds/``."""
    return _HEADER + yaml.dump(generate(kind), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def drift(folder: Path) -> Iterator[str]:
    """The lines of a diff between the files in the folder and what the models say; none when they agree."""
    for kind in KINDS:
        path = folder / kind.file_name
        written = path.read_text("utf-8") if path.exists() else ""
        yield from difflib.unified_diff(
            written.splitlines(keepends=True),
            render(kind).splitlines(keepends=True),
            fromfile=f"{PACKAGE}/{kind.file_name}",
            tofile="generated from app/api",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with ``--check`` compare them. 1 when they differ."""
    parser = argparse.ArgumentParser(prog="python -m app.api.crds", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, and show what differs")
    parser.add_argument("--folder", type=Path, help="where the files are; by default the package's crds/")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(str(resources.files(PACKAGE)))
    if options.check:
        lines = list(drift(folder))
        sys.stdout.writelines(lines)
        return 1 if lines else 0
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        (folder / kind.file_name).write_text(render(kind), "utf-8")
    return 0


class _Generator(GenerateJsonSchema):
    """Writes a default as the text that a manifest would carry."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, timedelta):
            return format_duration(dft)
        if isinstance(dft, Decimal):
            return format_money(dft)
        return super().encode_default(dft)


def _structural(node: Mapping[str, Any], defs: Mapping[str, Schema]) -> Schema:
    """A node with references inlined and without what is no part of a structural schema."""
    flat = _inlined(node, defs)
    for key in ("title", "$defs"):
        flat.pop(key, None)
    if flat.get("default", ...) in (None, []):  # absent, and not null or empty, is what absent means
        flat.pop("default", None)
    if isinstance(flat.get("additionalProperties"), bool):  # the API server prunes; nothing is to be said
        flat.pop("additionalProperties")
    if "propertyNames" in flat:
        raise ValueError("a structural schema has no rule for the keys of a map")
    if "const" in flat:
        flat["enum"] = [flat.pop("const")]
    if "description" in flat:
        flat["description"] = " ".join(flat["description"].split())
    for key in ("items", "additionalProperties"):
        if key in flat:
            flat[key] = _structural(flat[key], defs)
    if "properties" in flat:
        flat["properties"] = {name: _structural(each, defs) for name, each in flat["properties"].items()}
    return flat


def _inlined(node: Mapping[str, Any], defs: Mapping[str, Schema]) -> Schema:
    """The node with its reference, or the one alternative besides null, put in its place.

    What stands beside the reference wins, except that rules of both sides hold.
    """
    beside = copy.deepcopy(dict(node))
    under: Schema = {}
    if "anyOf" in beside:
        others = [each for each in beside.pop("anyOf") if each != {"type": "null"}]
        if len(others) != 1:
            raise ValueError(f"a structural schema allows one type a field, not {others}")
        under = _inlined(others[0], defs)
    elif "$ref" in beside:
        under = _inlined(defs[beside.pop("$ref").removeprefix("#/$defs/")], defs)
    both = [*under.get(VALIDATIONS, ()), *beside.get(VALIDATIONS, ())]
    return {**under, **beside, **({VALIDATIONS: both} if both else {})}


def _refuse(schema: Schema, row: NotBuilt) -> None:
    """Put a row's rule on the object that holds the field; no default may fill in what is refused."""
    holder = schema["properties"]["spec"]
    for name in row.path[:-1]:
        holder = holder["items"] if name == EACH else holder["properties"][name]
    field = holder["properties"][row.path[-1]]
    if not row.accepted:
        field.pop("default", None)
    holder[VALIDATIONS] = [*holder.get(VALIDATIONS, ()), row.cel]


# How the keys of a schema are written, so that a diff reads well: the rest stands between the two.
_FIRST: Final[tuple[str, ...]] = (
    *("description", "type", "format", "enum", "default", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "minItems", "maxItems", "maxProperties"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)
_LAST: Final[tuple[str, ...]] = (VALIDATIONS, "required", "items", "additionalProperties", "properties")
_RULE: Final[tuple[str, ...]] = ("rule", "message", "fieldPath", "reason")


def _in_order(node: Schema) -> Schema:
    keys = [key for key in _FIRST if key in node]
    keys += [key for key in node if key not in _FIRST and key not in _LAST]
    keys += [key for key in _LAST if key in node]
    ordered = {key: node[key] for key in keys}
    for key in ("items", "additionalProperties"):
        if key in ordered:
            ordered[key] = _in_order(ordered[key])
    if "properties" in ordered:
        ordered["properties"] = {name: _in_order(each) for name, each in ordered["properties"].items()}
    if VALIDATIONS in ordered:
        ordered[VALIDATIONS] = [
            {key: each[key] for key in _RULE if key in each} for each in ordered[VALIDATIONS]
        ]
    return ordered


class _Dumper(yaml.SafeDumper):
    """Block lists indented below their key, and no anchors: each schema is whole where it stands."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    sys.exit(main())
