"""What is asked of a simulated cloud, and how it refuses. No cloud's own words."""

from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from providers.base import Tier


class Refusal(StrEnum):
    """Why a simulated cloud refuses a call; each simulator says it in its cloud's own codes."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    AUTH = "auth"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    PRICE = "price"
    TOKEN = "token"  # the same token with another request: the first machine exists
    UNKNOWN_REGION = "unknown_region"
    NO_SUCH_MACHINE = "no_such_machine"
    NO_OUTPUT = "no_output"
    NOT_RUNNING = "not_running"
    NO_SUCH_PART = "no_such_part"
    IN_USE = "in_use"


class Refused(Exception):
    """A call was refused and had no effect."""

    def __init__(self, reason: Refusal, message: str, *, host: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.host = host


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a create asks for. ``exit_…`` and ``stop_…`` script the workload, None as the scenario.

    ``digest`` stands for the exact request: the same token with another one is refused. ``env`` maps names to
    digests of their values, which are not kept; ``values`` has them for a machine that runs processes.
    ``pull_problem``: why its image cannot be pulled.
    """

    name: str | None
    region: str
    tier: Tier
    accelerator: str | None
    count: int
    token: str | None = None
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    stdin: bool = False
    stdin_once: bool = False
    terminal: bool = False
    env: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict, repr=False)
    ports: tuple[int, ...] = ()
    pull_problem: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    disk_gib: int | None = None
    ceiling_usd_per_hour: Decimal | None = None
    avoid_hosts: frozenset[str] = frozenset()
    expires_after_s: float | None = None
    exit_after_s: float | None = None
    exit_code: int | None = None
    stop_after_s: float | None = None
    stop_code: int | None = None
    account: str | None = None
    digest: str = ""
