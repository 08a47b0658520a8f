"""Whether a Pod may run on a node at all: the scheduler's own hard rules, for virtual nodes. Pure.

Only what can rule a node out is read: ``nodeSelector``, required node affinity, taints. A rule that we do not
understand matches nothing, so that a Pod waits and says why rather than being placed where it is never bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Obj = Mapping[str, Any]

_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What placement sees of one virtual node; two equal views give equal rankings."""

    name: str
    ready: bool
    cordoned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple["Taint", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """One taint that keeps Pods away; soft ones are not read."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One expression of a selector term."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compares(value)
            case _:
                return False

    def _compares(self, value: str | None) -> bool:
        if value is None or len(self.values) != 1:
            return False
        try:
            left, right = int(value), int(self.values[0])
        except ValueError:
            return False
        return left > right if self.operator == "Gt" else left < right


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """All of it must hold; a term without any requirement matches no node, as in Kubernetes."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def holds(self, node: NodeView) -> bool:
        if not self.labels and not self.fields:
            return False
        fields = {"metadata.name": node.name}
        return all(each.holds(node.labels) for each in self.labels) and all(
            each.holds(fields) for each in self.fields
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """What makes a Pod bear a taint; an empty key or effect stands for all."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def bears(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        match self.operator:
            case "Exists":
                return not self.key or self.key == taint.key
            case "Equal":
                return self.key == taint.key and self.value == taint.value
            case _:
                return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConstraints:
    """A Pod's hard wishes of its node. ``terms`` None: no required affinity; else one of them must hold."""

    selector: Mapping[str, str] = field(default_factory=dict)
    terms: tuple[Term, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()

    def against(self, node: NodeView | None) -> str | None:
        """Why the Pod cannot go to this node now, in words; None when it can."""
        if node is None:
            return "its virtual node does not exist"
        if node.cordoned:
            return f"node {node.name} is cordoned"
        if not node.ready:
            return f"node {node.name} is not Ready"
        for key, value in sorted(self.selector.items()):
            if node.labels.get(key) != value:
                return f"the Pod's nodeSelector {key}={value} excludes node {node.name}"
        if self.terms is not None and not any(term.holds(node) for term in self.terms):
            return f"the Pod's required node affinity excludes node {node.name}"
        for taint in node.taints:
            if not any(toleration.bears(taint) for toleration in self.tolerations):
                return f"the Pod does not tolerate taint {taint} of node {node.name}"
        return None


def constraints_of(pod: Obj) -> NodeConstraints:
    """The constraints in a Pod's spec, as the API server has stored it."""
    spec = pod.get("spec") or {}
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = None
    if required is not None:
        terms = tuple(
            Term(
                labels=_requirements(term.get("matchExpressions")),
                fields=_requirements(term.get("matchFields")),
            )
            for term in required.get("nodeSelectorTerms") or ()
        )
    return NodeConstraints(
        selector=dict(spec.get("nodeSelector") or {}),
        terms=terms,
        tolerations=tuple(
            Toleration(
                key=each.get("key") or "",
                operator=each.get("operator") or "Equal",
                value=each.get("value") or "",
                effect=each.get("effect") or "",
            )
            for each in spec.get("tolerations") or ()
        ),
    )


def node_view(node: Obj) -> NodeView:
    """What placement sees of a Node object."""
    spec = node.get("spec") or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    return NodeView(
        name=node["metadata"]["name"],
        ready=any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
        cordoned=bool(spec.get("unschedulable")),
        labels=dict(node["metadata"].get("labels") or {}),
        taints=tuple(
            Taint(key=each["key"], value=each.get("value") or "", effect=each["effect"])
            for each in spec.get("taints") or ()
            if each.get("effect") in _HARD_EFFECTS
        ),
    )


def _requirements(expressions: Any) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(
            key=each.get("key") or "",
            operator=each.get("operator") or "",
            values=tuple(each.get("values") or ()),
        )
        for each in expressions or ()
    )
