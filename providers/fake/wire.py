"""What a fake cloud sends, checked where it arrives. Money is exact text on the wire; times carry a zone."""

from datetime import UTC
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel

from providers.base import BillsFrom, BillsUntil, Completion, MeterKind, Tier
from providers.capabilities import PartKind

Time = Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]


class About(BaseModel):
    tiers: frozenset[Tier]
    lists_by_region: bool
    idempotent_for_s: float | None
    settle_after_s: float
    list_every_s: float
    calls_per_s: float
    completion: Completion
    restarts: bool
    processes: bool = False
    dead_man: bool
    boot_s: float
    max_lifetime_s: float | None
    ended_listed_s: float | None
    needs_accelerator: bool
    bills_from: BillsFrom
    bills_until: BillsUntil
    bill_step_s: int
    bill_minimum_s: int
    bill_reclaim_free_s: int = 0


class MeterBody(BaseModel):
    kind: MeterKind
    quantity: Decimal
    usd: Decimal | None


class EndBody(BaseModel):
    reason: str
    message: str
    at: Time | None
    exit_code: int | None
    image: bool


class PortBody(BaseModel):
    port: int
    address: str


class MachineBody(BaseModel):
    id: str
    name: str | None
    region: str
    tier: Tier
    state: str
    created_at: Time
    started_at: Time | None
    address: str | None
    ports: list[PortBody]
    host: str | None
    meters: list[MeterBody]
    end: EndBody | None
    expires_at: Time | None


class CreatedBody(MachineBody):
    account_id: str
    reserved: bool


class PageBody(BaseModel):
    account_id: str
    total: int
    items: list[MachineBody]
    next: str | None


class PartBody(BaseModel):
    id: str
    kind: PartKind
    name: str | None
    region: str
    created_at: Time
    in_use: bool


class PartsBody(BaseModel):
    account_id: str
    total: int
    items: list[PartBody]


class OfferBody(BaseModel):
    region: str
    tier: Tier
    accelerator: str | None
    count: int
    shape: str
    meters: list[MeterBody]


class OffersBody(BaseModel):
    items: list[OfferBody]


class BillLineBody(BaseModel):
    id: str
    name: str | None
    start: Time
    end: Time
    usd: Decimal | None
    currency: str


class BillBody(BaseModel):
    account_id: str
    items: list[BillLineBody]


class AccountBody(BaseModel):
    account_id: str


class StreamBody(BaseModel):
    port: int
    ticket: str


class UsageBody(BaseModel):
    at: Time
    cpu_s: float | None = None
    memory_bytes: int | None = None
