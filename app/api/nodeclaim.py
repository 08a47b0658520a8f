"""NodeClaim: one candidate, chosen for one Pod, and what became of it. Cluster-scoped; only Nebula writes it.

The spec never changes: what is rented, and what is destroyed, is read from here and not from the Pod. The
status carries the mark (`Mark`), which the schema lets only grow: it says up to which attempt something may
have been sent to the provider.
"""

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from app.api.keys import DEFAULT_ACCOUNT
from app.api.model import CapacityType, Condition, Model, Resource, Timestamp, keyed_by, rule, rules
from app.api.nodepool import Egress
from app.api.quantities import Price

IMMUTABLE = rule("self == oldSelf", "spec is immutable: a claim is one candidate, made for one Pod")

OptionValue = Annotated[str, StringConstraints(max_length=1024)]


class ClaimPodRef(Model):
    """The Pod that the claim serves, in this incarnation."""

    namespace: str = Field(min_length=1, max_length=63, description="The Pod's namespace.")
    name: str = Field(min_length=1, max_length=253, description="The Pod's name.")
    uid: str = Field(
        min_length=1, max_length=128, description="The Pod's UID: a new Pod of the name is not served."
    )


class NodeClaimSpec(Model):
    """What is to be rented, frozen at placement."""

    pod_ref: ClaimPodRef = Field(description="The Pod that the claim serves, in this incarnation.")
    pool_ref: str | None = Field(default=None, max_length=253, description="The NodePool it was placed from.")
    provider: str = Field(min_length=1, max_length=63, description="The chosen provider.")
    account: str = Field(
        default=DEFAULT_ACCOUNT,
        min_length=1,
        max_length=63,
        description="The chosen account of the provider.",
    )
    region: str | None = Field(
        default=None,
        max_length=4096,
        description="The chosen region in the provider's own words; absent: any.",
    )
    capacity_type: CapacityType | None = Field(
        default=None, description="How the machine is bought; absent: the provider's default."
    )
    accelerator: str | None = Field(
        default=None,
        max_length=128,
        description="Type and count, such as H100:8; absent for a machine without.",
    )
    max_price: Price | None = Field(
        default=None, description="Dollars an hour above which the machine is not taken. Absent: no ceiling."
    )
    provider_options: dict[str, OptionValue] = Field(
        default_factory=dict,
        max_length=64,
        description="What the Pod asked of this one provider, by option name.",
    )
    egress: Egress | None = Field(default=None, description="The pool's egress policy at placement.")


class Mark(Model):
    """The latest attempt that may have been sent to the provider. Set before anything is sent."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.sequence >= oldSelf.sequence", "the sequence of an attempt must not go back")
        )
    )

    sequence: int = Field(
        ge=1,
        json_schema_extra={"format": "int64"},
        description="The attempt's sequence number.",
    )
    send_by: Timestamp = Field(description="The moment after which nothing of the attempt is sent any more.")
    account_id: str | None = Field(
        alias="accountID",
        default=None,
        max_length=1024,
        description="The provider's own id of the account that it may have been sent to.",
    )


class NodeClaimStatus(Model):
    """What became of the candidate."""

    phase: str | None = Field(
        default=None,
        max_length=64,
        description="Provisioning, Bound, Terminating or Terminated; absent until the Pod was seen.",
    )
    instance_id: str | None = Field(
        alias="instanceID", default=None, max_length=1024, description="The machine's id at the provider."
    )
    account: str | None = Field(
        default=None, max_length=63, description="The account that holds the machine."
    )
    region: str | None = Field(
        default=None, max_length=4096, description="The region that the machine is in."
    )
    node_name: str | None = Field(
        default=None, max_length=253, description="The virtual node that serves the Pod."
    )
    endpoint: str | None = Field(default=None, max_length=8192, description="The machine's address.")
    attempt: Mark | None = Field(
        default=None, description="The latest attempt that may have been sent to the provider."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra=keyed_by("type"),
        description="Released is False while a person must help, or the claim cannot go.",
    )


class NodeClaim(Resource):
    """One candidate, chosen for one Pod, and what became of it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(oldSelf.status) || !has(oldSelf.status.attempt) "
                "|| (has(self.status) && has(self.status.attempt))",
                "status.attempt must not be removed: a machine may have been asked for",
            )
        )
    )

    spec: NodeClaimSpec = Field(
        json_schema_extra=rules(IMMUTABLE), description="What is to be rented, frozen at placement."
    )
    status: NodeClaimStatus = Field(
        default_factory=NodeClaimStatus, description="What became of the candidate. Written by Nebula."
    )
