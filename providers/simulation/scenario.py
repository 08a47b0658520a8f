"""What a simulated cloud is like: one YAML file, checked at once, every error naming its field.

A scenario holds what is true from the start; what happens later (a fault, less capacity, a reclaim) comes
through the control API. Durations are seconds of the cloud's clock, prices exact dollars an hour.
`docs/samples/scenarios/` has examples, and every field stands here with its meaning.
"""

import secrets
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from providers.base import Tier

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Region = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


def _exact(value: Any) -> Any:
    # YAML reads 4.20 as a float; its shortest text is what was written.
    return str(value) if isinstance(value, float) else value


def _tier(value: Any) -> Any:
    # RunPod's words: two clouds in one, and no spot.
    return {"SECURE": Tier.ON_DEMAND, "COMMUNITY": Tier.SPOT}.get(value, value)


Bought = Annotated[Tier, BeforeValidator(_tier)]
Usd = Annotated[Decimal, BeforeValidator(_exact), Field(ge=0, allow_inf_nan=False)]


class ScenarioError(ValueError):
    """A scenario that cannot be used; one line for each error, with the file and the field."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClockPart(_Part):
    scale: float = Field(1.0, gt=0, le=10_000, description="Simulated seconds a real second.")
    skew_s: float = Field(0.0, description="How far the cloud's clock is ahead of the machine's.")


class Lag(_Part):
    """Lists and gets that tell yesterday's truth."""

    list_create_s: Seconds = Field(0.0, description="A new machine stays out of lists for so long.")
    get_create_s: Seconds = Field(0.0, description="A get by a new id answers 'no such machine' for so long.")
    list_terminate_s: Seconds = Field(0.0, description="A machine that is gone stays in lists for so long.")


class Life(_Part):
    """How long each phase of a machine lasts. Each may be changed while the cloud runs."""

    queue_s: Seconds = Field(0.0, description="Accepted, waiting for capacity to be committed.")
    boot_s: Seconds = Field(2.0, description="Capacity committed until running.")
    end_s: Seconds = Field(0.0, description="Terminate accepted until gone; capacity is held.")
    exit_after_s: Seconds | None = Field(None, description="Every workload ends so long after running.")
    exit_code: int = Field(0, ge=0, le=255, description="The code with which exit_after_s ends it.")
    stop_s: Seconds = Field(
        0.0,
        description="A workload that is asked to stop ends so long after, with 143; at the grace with 137.",
    )
    restart_s: Seconds = Field(0.0, description="A restart asked for until the workload runs again.")
    exit_restarts: bool = Field(
        False, description="A workload that ends is started again at once, for ever, and nobody is told."
    )
    max_s: Seconds | None = Field(None, gt=0, description="The longest life from creation, then it is gone.")
    exited_s: Seconds | None = Field(None, description="An exited machine goes by itself after so long.")
    reclaim_after_s: Seconds | None = Field(
        None, description="Every Spot machine is reclaimed so long after running."
    )
    reclaim_leaves: Literal["exited", "gone"] = Field("exited", description="What a reclaim leaves behind.")


class Serve(_Part):
    """What running workloads do with the ports of their orders: answer HTTP on the loopback interface."""

    ready_after_s: Seconds = Field(0.0, description="Running until ready: connections are refused before.")
    status: int = Field(200, ge=0, le=599, description="Every answer's status; 0: accept, and never answer.")


class ProcessesPart(_Part):
    """Machines run their command as a local process: for demos and tests, on Linux."""

    user: str = Field("nobody", description="The account of the processes where the simulator runs as root.")
    output_bytes: int = Field(1 << 30, ge=1 << 16, description="What one run may say; the rest is dropped.")


class Images(_Part):
    """Which images cannot be pulled. The order is taken all the same, as clouds do, and fails at its boot."""

    missing: tuple[str, ...] = Field((), description="References that no registry knows.")
    private: dict[str, str] = Field(
        default_factory=dict, repr=False, description="Registry host: the USER:PASSWORD that it asks for."
    )


class Billing(_Part):
    """When the meters run. Which states bill, and how the seconds are rounded at the end."""

    states: frozenset[Literal["queued", "booting", "running", "exited", "ending"]] = Field(
        frozenset({"booting", "running", "exited"}), description="States in which the meters run."
    )
    unit_s: Seconds = Field(1.0, description="The total is rounded up to whole units; 0: exact microseconds.")
    minimum_s: Seconds = Field(0.0, description="The least that is billed once a machine has billed at all.")
    reclaim_free_s: Seconds = Field(
        0.0, description="Reclaimed within so long of running: nothing is billed."
    )
    follow_market: bool = Field(False, description="A price change moves running machines as well.")


class Offer(_Part):
    """One kind of accelerator (or none) that can be rented, in some regions."""

    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] | None = None
    counts: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field((1,), min_length=1)
    regions: tuple[Region, ...] | None = Field(None, description="Default: every region of the cloud.")
    usd_per_hour: dict[Bought, Usd | None] = Field(
        description="By tier, for one GPU (the machine where there is none). null: no price told.",
        min_length=1,
    )
    machine_usd_per_hour: Usd = Field(
        Decimal(0), description="For the machine around the GPUs, if sold apart."
    )
    capacity: dict[Bought, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="GPUs (machines where there is none) in each region; a tier left out has no limit.",
    )

    @model_validator(mode="after")
    def _check(self) -> "Offer":
        if self.accelerator is None and self.counts != (1,):
            raise ValueError("counts needs an accelerator")
        if extra := sorted(set(self.capacity) - set(self.usd_per_hour)):
            raise ValueError(f"capacity names {', '.join(extra)}, which usd_per_hour does not offer")
        return self


class Scenario(_Part):
    """A whole cloud at its start."""

    cloud: str = Field("fake", min_length=1, description="Its name, in ids and messages.")
    account: str = Field(
        default_factory=lambda: f"acct-{secrets.token_hex(4)}",
        min_length=1,
        description="What the cloud calls the account. Default: one of its own, kept with the state.",
    )
    credential: str | None = Field(
        None, min_length=1, repr=False, description="Bearer token; null: none asked."
    )
    regions: tuple[Region, ...] = Field((), description="Exact names; empty: the cloud has no regions.")
    lists: Literal["regional", "global"] | None = Field(
        None,
        description="Whether one list shows one region or all. Default: regional where there are regions.",
    )
    page_size: int = Field(1000, ge=1, le=10_000)
    idempotent_for_s: Seconds | None = Field(
        None, description="The same token makes no second machine for so long; null: tokens mean nothing."
    )
    on_token_reuse: Literal["refuse", "shrug"] = Field(
        "refuse",
        description="The same token with another request: an error, or the first machine as if asked.",
    )
    on_no_capacity: Literal["refuse", "queue"] = "refuse"
    check_ceiling: bool = Field(False, description="A create whose price is above its ceiling is refused.")
    quota_gpus: int | None = Field(None, ge=0, description="GPUs of the account at one time, all regions.")
    hosts: int = Field(0, ge=0, description="Machines are spread over so many named hosts; 0: not told.")
    history_s: Seconds = Field(0.0, description="How long a gone machine is still shown, as gone.")
    completion: Literal["code", "ended", "never"] = Field(
        "code", description="What is told of a workload's end."
    )
    dead_man: bool = Field(
        True, description="Whether an order may carry a limit that only extending puts off."
    )
    keys: bool = Field(False, description="Every machine comes with a key, which stays when it goes.")
    restarts: bool = Field(True, description="Whether a workload can be started again on its machine.")
    settle_after_s: Seconds | None = Field(None, description="Told to clients. Default: list_create_s + 10.")
    list_every_s: Seconds = Field(0.05, description="Told to clients: the least time between lists.")
    calls_per_s: float = Field(500.0, gt=0, description="Told to clients: the call rate they may use.")
    disk_usd_per_gib_hour: Usd | None = Field(None, description="null: disk is part of the price.")
    disk_min_gib: int = Field(10, ge=1)
    clock: ClockPart = ClockPart()
    lag: Lag = Lag()
    life: Life = Life()
    serve: Serve | None = Field(None, description="null: workloads serve nothing, and only have an address.")
    processes: ProcessesPart | None = Field(
        None, description="null: nothing runs, and workloads end as the scenario says."
    )
    images: Images = Images()
    billing: Billing = Billing()
    quirks: dict[str, Any] = Field(
        default_factory=dict, description="Switches of one cloud's simulator, which has them checked."
    )
    offers: tuple[Offer, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "Scenario":
        if len(set(self.regions)) != len(self.regions):
            raise ValueError("regions names one region twice")
        if self.serve is not None and self.processes is not None:
            raise ValueError("serve and processes exclude each other: processes open their own ports")
        if self.lists == "regional" and not self.regions:
            raise ValueError("lists: regional needs regions")
        seen: set[tuple[str, str]] = set()
        for index, offer in enumerate(self.offers):
            for region in self.regions_of(offer):
                if region and region not in self.regions:
                    raise ValueError(f"offers.{index}.regions: {region} is not in regions")
                key = ((offer.accelerator or "").lower(), region)
                if key in seen:
                    where = f" in {region}" if region else ""
                    raise ValueError(
                        f"offers.{index}: {offer.accelerator or 'no accelerator'} is offered twice{where}"
                    )
                seen.add(key)
        return self

    def regions_of(self, offer: Offer) -> tuple[str, ...]:
        """Where an offer can be had; ("",) on a cloud without regions."""
        if not self.regions:
            return ("",) if offer.regions is None else offer.regions
        return self.regions if offer.regions is None else offer.regions

    @property
    def lists_by_region(self) -> bool:
        return bool(self.regions) if self.lists is None else self.lists == "regional"

    @property
    def tiers(self) -> frozenset[Tier]:
        return frozenset(tier for offer in self.offers for tier in offer.usd_per_hour)


def parse(text: str, *, source: str = "scenario") -> Scenario:
    """Raises:
    ScenarioError: with one line for each error, ``source: field: what is wrong``.
    """
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ScenarioError(f"{source}: must be a mapping, for example `offers: [...]`")
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        lines = []
        found = error.errors(include_url=False, include_input=False)
        places = [item["loc"] for item in found]
        for item in found:
            place = item["loc"]
            if any(len(other) > len(place) and other[: len(place)] == place for other in places):
                continue  # it only says that something inside it is wrong
            field = ".".join(str(part) for part in place)
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{source}: {field}: {message}" if field else f"{source}: {message}")
        raise ScenarioError("\n".join(lines)) from None


def load(path: Path) -> Scenario:
    """Raises:
    ScenarioError: the file cannot be read, or what `parse` says.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    return parse(text, source=str(path))
