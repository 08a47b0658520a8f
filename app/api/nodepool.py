"""NodePool: which providers a Pod may go to, in which order, for how much. Cluster-scoped; users write it.

The schema is complete; what this version does not act on yet is refused at admission (`app.api.not_built`).
"""

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from app.api.keys import DEFAULT_ACCOUNT, NODE_POOL_LABEL
from app.api.model import CapacityType, Condition, Model, Resource, keyed_by, ordered, rule, rules
from app.api.quantities import Duration, Price

BLOCKLIST_TTL = timedelta(seconds=30)
RESERVE_TIMEOUT = timedelta(minutes=15)
UNKNOWN_TIMEOUT = timedelta(minutes=5)


class Strategy(StrEnum):
    """How candidates of one tier are ranked."""

    ORDERED = "Ordered"
    LOWEST_PRICE = "LowestPrice"
    WEIGHTED = "Weighted"


class FailoverMode(StrEnum):
    """When the machine is rented: for the bound Pod, or while it is still gated."""

    REPLACE = "Replace"
    RESERVE = "Reserve"


class EgressMode(StrEnum):
    """What a workload may reach."""

    OPEN = "Open"
    BLOCKED = "Blocked"
    ALLOWLIST = "Allowlist"


class ProviderEntry(Model):
    """One provider that Pods of the pool may go to."""

    name: str = Field(min_length=1, max_length=63, description="The provider's name, such as modal or aws.")
    account: str = Field(
        default=DEFAULT_ACCOUNT,
        min_length=1,
        max_length=63,
        description="Which configured account of the provider to use.",
    )
    regions: tuple[Annotated[str, StringConstraints(max_length=32)], ...] = Field(
        default=(),
        json_schema_extra=ordered(),
        description="Regions or groups of regions, such as us, as they are tried. Absent: anywhere.",
    )
    weight: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        json_schema_extra={"format": "int32"},
        description="The provider's share of the pool's machines under strategy Weighted.",
    )

    @property
    def region_tokens(self) -> tuple[str, ...]:
        """The regions as the user meant them: trimmed, no blanks, none twice. Empty means anywhere."""
        return tuple(dict.fromkeys(token for region in self.regions if (token := region.strip())))


class Failover(Model):
    """What happens when a candidate cannot be had."""

    mode: FailoverMode = Field(
        default=FailoverMode.REPLACE,
        description="Replace: the machine is rented for the bound Pod; a Pod that gets none fails, and its "
        "owner makes the next. Reserve: the Pod stays gated until it has a machine.",
    )
    blocklist_ttl: Duration = Field(
        alias="blocklistTTL",
        default=BLOCKLIST_TTL,
        description="How long a candidate that refused is passed over, such as 10m; up to 30s are added.",
    )
    reserve_timeout: Duration = Field(
        default=RESERVE_TIMEOUT,
        description="How long a machine that the provider has queued may wait for capacity in mode Reserve.",
    )
    unknown_timeout: Duration = Field(
        default=UNKNOWN_TIMEOUT,
        description="How long to look for a machine whose order got no answer before the workload moves on.",
    )


class Egress(Model):
    """What workloads of the pool may reach. A provider that cannot enforce it is passed over."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.targets) || self.mode == 'Allowlist'", "targets is only valid with mode Allowlist"
            ),
            rule(
                "self.mode != 'Allowlist' || (has(self.targets) && size(self.targets) > 0)",
                "mode Allowlist requires at least one target; use mode Blocked to permit nothing",
            ),
            rule(
                "!has(self.targets) || self.targets.all(t, !t.contains(','))",
                "a target must not contain a comma; list each target as its own entry",
            ),
        )
    )

    mode: EgressMode = Field(description="Open: everything. Blocked: nothing. Allowlist: the targets only.")
    targets: tuple[Annotated[str, StringConstraints(max_length=253)], ...] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra=ordered(),
        description="CIDRs, addresses or domain names (a leading *. is allowed) that may be reached.",
    )


class Limits(Model):
    """What all machines of the pool together may be. Reserved before a machine is asked for."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.gpus) || has(self.usdPerHour)", "limits needs gpus or usdPerHour")
        )
    )

    gpus: int | None = Field(
        default=None, ge=1, json_schema_extra={"format": "int64"}, description="GPUs at one time."
    )
    usd_per_hour: Price | None = Field(default=None, description='Dollars an hour at one time, such as "40".')


class BudgetAction(StrEnum):
    """What a spent budget does, in rising force."""

    ALERT = "Alert"
    REFUSE_NEW = "RefuseNew"
    REFUSE_ON_DEMAND = "RefuseOnDemand"
    DRAIN = "Drain"


class Budget(Model):
    """What the pool may spend in a period: counted as spent, plus what is running times a look-ahead."""

    amount: Price = Field(description='Dollars in a period, such as "500".')
    period: Literal["day", "week", "month", "total"] = Field(description="When counting starts again.")
    thresholds: tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        default=(50, 80, 100),
        max_length=10,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Percentages of the amount at which an Event is written.",
    )
    action: BudgetAction = Field(
        default=BudgetAction.ALERT,
        description="At the full amount. Alert: Events only. RefuseNew: no new machine. RefuseOnDemand: new "
        "Spot machines only. Drain: running machines are ended.",
    )


class SelectorRequirement(Model):
    """One condition on a label."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.operator in ['In', 'NotIn'] == (has(self.values) && size(self.values) > 0)",
                "values must be given for operators In and NotIn, and for no other",
            )
        )
    )

    key: str = Field(max_length=317, description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How its value is compared."
    )
    values: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        json_schema_extra=ordered(),
        description="The values to compare with; none for Exists and DoesNotExist.",
    )

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels meets it; a label that is not there is in no set."""
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


class LabelSelector(Model):
    """A label selector as everywhere in Kubernetes: all of it must hold, and an empty one selects all."""

    match_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels that must have these values."
    )
    match_expressions: tuple[SelectorRequirement, ...] = Field(
        default=(), max_length=64, json_schema_extra=ordered(), description="Conditions that must all hold."
    )

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is meant."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.holds(labels) for requirement in self.match_expressions
        )


class NodePoolSpec(Model):
    """Where Pods of the pool may run, and for how much."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.strategy != 'Weighted' || self.providers.all(p, has(p.weight))",
                "strategy Weighted requires a weight on every provider",
            )
        )
    )

    providers: tuple[ProviderEntry, ...] = Field(
        min_length=1,
        max_length=8,
        json_schema_extra=keyed_by("name", "account"),
        description="The providers, in the order in which strategy Ordered tries them.",
    )
    capacity_types: tuple[CapacityType, ...] = Field(
        default=(CapacityType.ON_DEMAND, CapacityType.SPOT),
        min_length=1,
        max_length=2,
        json_schema_extra={
            **ordered(),
            **rules(
                rule("self.all(t, self.exists_one(x, x == t))", "a capacity type must not be listed twice")
            ),
        },
        description="How machines may be bought. Every provider and region is tried in the first way before "
        "any in the second.",
    )
    strategy: Strategy = Field(
        default=Strategy.ORDERED,
        description="How candidates of one capacity type are ranked. Ordered: as listed. LowestPrice: "
        "cheapest machine first. Weighted: towards each provider's weight.",
    )
    failover: Failover = Field(
        default_factory=Failover, description="What happens when a candidate cannot be had."
    )
    egress: Egress | None = Field(default=None, description="What workloads may reach. Absent: everything.")
    max_price: Price | None = Field(
        default=None, description='Dollars an hour for one whole machine, disk included, such as "25".'
    )
    spot_max_price: Price | None = Field(
        default=None, description="The same for Spot machines; absent: maxPrice holds for them too."
    )
    limits: Limits | None = Field(default=None, description="What all machines of the pool together may be.")
    budget: Budget | None = Field(default=None, description="What the pool may spend in a period.")
    namespace_selector: LabelSelector | None = Field(
        default=None, description="Namespaces whose Pods may use the pool, by their labels. Absent: all."
    )

    def ceiling_usd_per_hour(self, capacity_type: CapacityType) -> Decimal | None:
        """Dollars an hour that one machine may cost: for Spot the Spot ceiling, else the general one."""
        if capacity_type is CapacityType.SPOT and self.spot_max_price is not None:
            return self.spot_max_price
        return self.max_price


class NodePoolStatus(Model):
    """What the pool looks like now. Written by Nebula."""

    placed: dict[str, Annotated[int, Field(ge=0, json_schema_extra={"format": "int32"})]] | None = Field(
        default=None, description="Machines that serve a Pod now, by provider. Absent when there are none."
    )
    providers: str | None = Field(default=None, description="The names of all providers, for kubectl get.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra=keyed_by("type"),
        description="Ready is True when every provider of the pool is known and nobody has deleted it.",
    )


class NodePool(Resource):
    """Which providers a Pod may go to, in which order, and what it may cost."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "size(self.metadata.name) <= 63",
                f"metadata.name must have at most 63 characters: the label {NODE_POOL_LABEL} holds it",
            )
        )
    )

    spec: NodePoolSpec = Field(description="Where Pods of the pool may run, and for how much.")
    status: NodePoolStatus = Field(
        default_factory=NodePoolStatus, description="What the pool looks like now. Written by Nebula."
    )

    @property
    def spot_ceiling_usd_per_hour(self) -> Decimal | None:
        """Dollars an hour that one Spot machine may cost."""
        return self.spec.ceiling_usd_per_hour(CapacityType.SPOT)
