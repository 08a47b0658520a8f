"""CloudPodBinding: where a Pod went and what it costs, in the Pod's own namespace.

For people who may read their namespace and no cluster objects. It is a copy: nothing decides anything by it.
"""

from pydantic import Field

from app.api.keys import DEFAULT_ACCOUNT
from app.api.model import CapacityType, Condition, Model, Resource, keyed_by, rule, rules
from app.api.quantities import Money

IMMUTABLE = rule("self == oldSelf", "spec is immutable: a binding records one placement")


class BindingPodRef(Model):
    """The Pod, in this incarnation."""

    name: str = Field(min_length=1, max_length=253, description="The Pod's name.")
    uid: str = Field(min_length=1, max_length=128, description="The Pod's UID.")


class CloudPodBindingSpec(Model):
    """One placement of a Pod."""

    pod_ref: BindingPodRef = Field(description="The Pod, in this incarnation.")
    claim_name: str = Field(min_length=1, max_length=253, description="The NodeClaim that holds the machine.")
    provider: str = Field(min_length=1, max_length=63, description="The provider that the Pod went to.")
    account: str = Field(
        default=DEFAULT_ACCOUNT, min_length=1, max_length=63, description="The account of the provider."
    )
    region: str | None = Field(
        default=None, max_length=4096, description="The region in the provider's own words; absent: any."
    )
    capacity_type: CapacityType | None = Field(default=None, description="How the machine is bought.")
    external_name: str | None = Field(
        default=None,
        max_length=63,
        description="What the names of the machine begin with in the provider's own list.",
    )


class CloudPodBindingStatus(Model):
    """What became of the placement."""

    phase: str | None = Field(
        default=None,
        max_length=64,
        description="Provisioning, Bound, Terminating or Terminated, as on the claim.",
    )
    instance_id: str | None = Field(
        alias="instanceID", default=None, max_length=1024, description="The machine's id at the provider."
    )
    price_per_hour: Money | None = Field(
        default=None, description="Dollars an hour that the provider quoted. Absent: unknown."
    )
    endpoint: str | None = Field(default=None, max_length=8192, description="The machine's address.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra=keyed_by("type"),
        description="Provisioned: there is a machine. Ready: it is reachable. Capacity: one was to be had.",
    )


class CloudPodBinding(Resource):
    """Where a Pod went and what it costs."""

    spec: CloudPodBindingSpec = Field(
        json_schema_extra=rules(IMMUTABLE), description="One placement of a Pod."
    )
    status: CloudPodBindingStatus = Field(
        default_factory=CloudPodBindingStatus, description="What became of the placement. Written by Nebula."
    )
