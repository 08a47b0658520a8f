"""What RunPod's REST v2 sends, checked where it arrives. Money is exact from its text; times carry a zone.

Only what the adapter uses is read, and what newer servers add is ignored. ``env`` comes back in clear in
every list and get: only our own variables are kept, so that nobody's secret lives on in our memory.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, Field

IDENTITY_VARIABLE: Final = "NEBULA_IDENTITY"
"""Carries the machine's identity beside its name: readable in lists, and not renamed by people."""

DISK_VARIABLE: Final = "NEBULA_DISK_GB"
"""How much disk we asked for: an older server may not show ``disk``."""

JOB_VARIABLE: Final = "NEBULA_JOB"
"""There where the command's end is told in the log."""

SENT_VARIABLE: Final = "NEBULA_SENT"
"""When its create was sent, in seconds since 1970 of our clock: a copy that a person makes is younger."""

SSH_VARIABLE: Final = "NEBULA_SSH"
"""There where we may enter by sshd: ``added`` when its port is for us alone, ``own`` when the Pod has it."""

PUBLIC_KEY_VARIABLE: Final = "PUBLIC_KEY"
"""What RunPod's own images put into authorized_keys, and start their sshd for."""

_COPY_S: Final = 300.0  # so long after its create was sent no answer of ours is on its way any more
_TELLING_CHARS: Final = 12  # of a name that was cut short: shorter ones may be anybody's
_OURS: Final = (IDENTITY_VARIABLE, DISK_VARIABLE, JOB_VARIABLE, SENT_VARIABLE, SSH_VARIABLE)


def _exact(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


def _own(value: Any) -> Any:
    return {name: value[name] for name in _OURS if name in value} if isinstance(value, Mapping) else {}


def _believable(value: Any) -> Any:
    """Newer servers may send a time in a form that we do not know; that is no time, and no error."""
    if not isinstance(value, str) or not value:
        return None
    try:
        at = datetime.fromisoformat(value.replace(" +0000 UTC", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)


Money = Annotated[Decimal, BeforeValidator(_exact), Field(allow_inf_nan=False)]
Time = Annotated[
    AwareDatetime | None,
    BeforeValidator(_believable),
    AfterValidator(lambda at: at.astimezone(UTC) if at else None),
]


class PortRow(BaseModel):
    """One port of the container. ``public`` and ``ip`` are null until it is mapped."""

    private: int
    public: int | None = None
    type: str = ""
    ip: str | None = None


class Runtime(BaseModel):
    uptime: float | None = None
    ports: list[PortRow] = []


class SshDoor(BaseModel):
    host: str = Field(min_length=1)
    port: int
    username: str = ""


class SshDoors(BaseModel):
    """``proxy`` is a terminal for people, with neither commands nor forwarding: it is left out."""

    direct: SshDoor | None = None


class PodGpu(BaseModel):
    id: str | None = None
    count: int = 1


class Pod(BaseModel):
    id: str = Field(min_length=1)
    name: str | None = None
    status: str
    env: Annotated[dict[str, str], BeforeValidator(_own)] = {}
    ports: list[str] | None = None
    gpu: PodGpu | None = None
    cloud: str | None = None
    disk: int | None = None
    data_center: str | None = Field(None, alias="dataCenterId")
    cost: Money | None = None
    runtime: Runtime | None = None
    ssh: SshDoors | None = None
    created_at: Time = Field(None, alias="createdAt")
    started_at: Time = Field(None, alias="startedAt")

    @property
    def identity(self) -> str | None:
        """Name and environment together; None where they differ.

        A person's copy of a pod of ours keeps our environment under a name of its own, and one of ours that
        is renamed cannot be told from that: such a pod is ours only where its id is on record (`maybe`). A
        name that the cloud cuts short, or adds to, agrees: how long a name may be is not documented.
        """
        told, name = self.env.get(IDENTITY_VARIABLE) or None, self.name or None
        if told is None or name is None or told == name:
            return told or name
        short, long = sorted((told, name), key=len)
        return told if len(short) >= _TELLING_CHARS and long.startswith(short) else None

    @property
    def maybe(self) -> str | None:
        """The identity in its environment where its name denies it, and it is not plainly a copy.

        A copy is made later than the pod that it is of; one that is made minutes after our create was sent
        cannot be what that create made.
        """
        told = self.env.get(IDENTITY_VARIABLE) or None
        if told is None or self.identity is not None:
            return None
        sent = self.env.get(SENT_VARIABLE, "")
        if self.created_at is not None and sent.isdecimal():
            return told if self.created_at.timestamp() - int(sent) <= _COPY_S else None
        return told

    @property
    def reporter(self) -> str | None:
        """What the shell in the container calls itself in its log, whatever the pod is called by now."""
        return self.env.get(IDENTITY_VARIABLE) or self.name or None

    @property
    def disk_gb(self) -> int:
        """Gigabytes of container disk."""
        if self.disk is not None:
            return self.disk
        text = self.env.get(DISK_VARIABLE, "")
        return int(text) if text.isdecimal() else 0


class Pagination(BaseModel):
    next_cursor: str | None = Field(None, alias="nextCursor")
    has_next: bool = Field(False, alias="hasNextPage")


class PodPage(BaseModel):
    """``pagination`` is missing on servers of before September 2026: that is the last page."""

    pods: list[Pod]
    pagination: Pagination | None = None


class Template(BaseModel):
    id: str = Field(min_length=1)
    name: str = ""


class Templates(BaseModel):
    templates: list[Template]


class Registry(BaseModel):
    id: str = Field(min_length=1)
    name: str = ""


class Registries(BaseModel):
    registries: list[Registry]


class Prices(BaseModel):
    secure: Money | None = None
    community: Money | None = None


class Counts(BaseModel):
    secure: int = 0
    community: int = 0


class Gpu(BaseModel):
    """A kind of card. A price may be there although the flag is false: the flag is right."""

    id: str = Field(min_length=1)
    name: str = ""
    secure: bool = False
    community: bool = False
    price: Prices = Prices()
    max_count: Counts = Field(Counts(), alias="maxCount")
    availability: str | None = None


class Gpus(BaseModel):
    gpus: list[Gpu]


class Centre(BaseModel):
    id: str = Field(min_length=1)


class Centres(BaseModel):
    centres: list[Centre] = Field(alias="dataCenters")


class BillRecord(BaseModel):
    """What one pod cost in one bucket of time."""

    pod_id: str = Field("", alias="podId")
    start: AwareDatetime = Field(alias="startTime")
    end: AwareDatetime = Field(alias="endTime")
    total: Money = Field(alias="totalAmount")


class BillRecords(BaseModel):
    records: list[BillRecord]
    pagination: Pagination | None = None


class LogLine(BaseModel):
    """The data of one event of a log stream."""

    ts: Time = None
    source: str = ""
    line: str = ""
