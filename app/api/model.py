"""What the models of all our kinds share: the base class, object metadata, conditions, and schema rules.

Models are read at the edge with ``Kind.model_validate(obj)`` and frozen from there on. Unknown fields are
ignored (the API server has pruned or refused them), and an absent field is written as absent, never as null.
"""

from collections.abc import Sequence
from datetime import UTC
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict, JsonValue

VALIDATIONS = "x-kubernetes-validations"

Timestamp = Annotated[AwareDatetime, AfterValidator(lambda value: value.astimezone(UTC))]
"""A moment in UTC, to the microsecond; RFC 3339 in manifests. One without a zone is refused."""


class Model(BaseModel):
    """Frozen; camelCase in JSON, snake_case here."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_json(self) -> dict[str, Any]:
        """The plain JSON value as the API server takes it: aliases, amounts and times as strings.

        Only what was given is written: no nulls, and no defaults, which are the API server's to fill in.
        """
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


class CapacityType(StrEnum):
    """How a machine is bought: Spot machines are cheaper, and may be taken back at any moment."""

    SPOT = "Spot"
    ON_DEMAND = "OnDemand"


class ObjectMeta(Model):
    """The metadata we use. The API server owns its schema, so nothing here goes into a CRD."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: tuple[str, ...] = ()


class Condition(Model):
    """One observation of the object's state, in the form all of Kubernetes shares."""

    type: str = Field(
        min_length=1,
        max_length=316,
        pattern=(
            r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
        ),
        description="What is observed.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(
        default=None,
        ge=0,
        json_schema_extra={"format": "int64"},
        description="The generation of the object that was looked at.",
    )
    last_transition_time: Timestamp = Field(description="When the status last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="One word that tells programs why the status is what it is.",
    )
    message: str = Field(max_length=32768, description="A sentence that tells people the same.")


class Column(NamedTuple):
    """A column that ``kubectl get`` prints; ``wide``: only with ``-o wide``."""

    name: str
    type: Literal["string", "integer", "date"]
    json_path: str
    wide: bool = False


AGE = Column("Age", "date", ".metadata.creationTimestamp")


class Resource(Model):
    """An object: what the API server adds to every kind."""

    api_version: str = ""
    kind: str = ""
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)

    @field_validator("metadata", mode="before")
    @classmethod
    def _no_metadata(cls, value: Any) -> Any:
        return {} if value is None else value


def rule(cel: str, message: str, **more: str) -> JsonDict:
    """One CEL rule of a schema, and the message that a client sees when it does not hold."""
    return {"rule": cel, "message": message, **more}


def rules(*each: JsonDict, **extra: JsonValue) -> JsonDict:
    """Schema extras of a model or field: its CEL rules and any other ``x_kubernetes_…`` key."""
    validations: list[JsonValue] = list(each)
    named: JsonDict = {key.replace("_", "-"): value for key, value in extra.items()}
    return {VALIDATIONS: validations, **named} if validations else named


def keyed_by(*keys: str) -> JsonDict:
    """Schema extras of a list whose entries are found by these fields, and may not repeat them."""
    names: list[JsonValue] = list(keys)
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": names}


def ordered() -> JsonDict:
    """Schema extras of a list whose order means something: it is replaced whole, never merged."""
    return {"x-kubernetes-list-type": "atomic"}


def find_condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """The condition of this type, if it is there."""
    return next((condition for condition in conditions if condition.type == kind), None)
