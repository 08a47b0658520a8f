"""What goes wrong on purpose: a list of faults, each for the next calls that match it.

A fault that is used up or over goes by itself. The list is part of the state on disk. What a fault does to an
answer is the business of `http` and of each simulator; here is only which one applies to which call.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from providers.simulation.clock import micros

FaultKind = Literal[
    "lost",  # the connection closes without an answer
    "cut",  # the answer breaks off in its middle
    "status",  # an HTTP status without any documented code
    "garbage",  # 200, and a body that cannot be read
    "error_body",  # 200, and a body that says error
    "throttle",  # 429 with Retry-After
    "refuse",  # a documented refusal: `code` is a word of `orders.Refusal`
    "expired",  # the credential is not accepted
    "slow",  # the answer takes `delay_s` longer
    "hold",  # the answer waits until the fault is cleared
    "ignored",  # terminate: accepted, and not carried out
    "phantom",  # create: accepted, and never becomes a machine
    "truncate",  # list: only the first `keep` machines, the total still counts all
    "shrink",  # list: the same, and the total counts no more than is shown
    "hide",  # list and get: machines younger than `age_s` (default: all) are not shown
    "foreign",  # list and account: the answer is that of another account
    "repeat_page",  # list: the next page is this page again, for ever
    "missing_total",  # list: the page names no total and no account
    "stream_cut",  # logs, exec, attach, connect: after `keep` bytes the stream breaks
    "stream_stall",  # the same, and nothing more comes while it stays open
    "stream_slow",  # `delay_s` before each piece
]

# These let nothing happen unless told otherwise; `lost` and `cut` lose only the answer.
_AFTER = {"lost", "cut", "garbage", "error_body"}


class Fault(BaseModel):
    """One fault. Filters that are not given match every call."""

    model_config = ConfigDict(extra="forbid")

    id: str = ""
    kind: FaultKind
    verb: str = Field(
        "*",
        description="about, account, offers, create, list, get, stop, restart, terminate, logs, exec, attach,"
        " connect or usage; * for all.",
    )
    region: str | None = Field(None, description="Only calls for exactly this region.")
    path: str | None = Field(None, description="Only calls whose path this regular expression finds.")
    name: str | None = Field(None, description="Only calls whose machine name contains this.")
    when: Literal["before", "after"] | None = Field(None, description="Before or after the call's effect.")
    times: Annotated[int, Field(ge=1)] | None = Field(
        None, description="For so many calls. Default 1, without limit where for_s is given or kind is hold."
    )
    unlimited: bool = Field(False, description="Until it is cleared.")
    skip: int = Field(0, ge=0, description="Let so many matching calls pass first.")
    for_s: float | None = Field(None, gt=0, description="Real seconds, from when it is added.")
    status: int = Field(500, ge=400, le=599)
    code: str = "capacity"
    message: str = "injected by a test"
    host: str | None = None
    retry_after_s: float | None = Field(1.0, ge=0)
    delay_s: float = Field(0.0, ge=0, description="Real seconds.")
    keep: int = Field(0, ge=0)
    age_s: float | None = Field(None, ge=0)
    until: int | None = Field(None, description="Set by the simulator: microseconds of its clock.")

    @field_validator("path")
    @classmethod
    def _compile(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value

    @property
    def after(self) -> bool:
        return self.when == "after" if self.when else self.kind in _AFTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call as faults see it. ``name`` is the machine name it is about, where the request tells."""

    verb: str
    path: str = ""
    region: str = ""
    name: str = ""


class Faults:
    """The list, oldest first. ``save`` is told the whole list whenever it changes."""

    def __init__(self, save: Callable[[list[dict[str, Any]]], None]) -> None:
        self._save = save
        self._faults: list[Fault] = []
        self._number = 0

    def restore(self, faults: Iterable[dict[str, Any]]) -> None:
        self._faults = [Fault.model_validate(fault) for fault in faults]
        numbers = [int(fault.id.removeprefix("f-")) for fault in self._faults]
        self._number = max(numbers, default=self._number)

    def dump(self) -> list[dict[str, Any]]:
        return [fault.model_dump(mode="json") for fault in self._faults]

    def add(self, fault: Fault, *, now: int, scale: float) -> Fault:
        self._number += 1
        fault.id = f"f-{self._number}"
        if fault.for_s is not None:
            fault.until = now + micros(fault.for_s * scale)
        if fault.times is None and fault.until is None and not fault.unlimited and fault.kind != "hold":
            fault.times = 1
        self._faults.append(fault)
        self._save(self.dump())
        return fault

    def clear(self, fault_id: str | None = None) -> int:
        """Remove one, or all; how many there were."""
        kept = [fault for fault in self._faults if fault_id is not None and fault.id != fault_id]
        removed = len(self._faults) - len(kept)
        if removed:
            self._faults = kept
            self._save(self.dump())
        return removed

    def active(self, fault: Fault, *, now: int) -> bool:
        """Whether a fault is still in force (a held call asks)."""
        over = fault.until is not None and now >= fault.until
        return not over and any(other.id == fault.id for other in self._faults)

    def take(self, call: Call, *, now: int) -> list[Fault]:
        """The faults that apply to this call, each counted down by one."""
        if not self._faults:
            return []
        taken, changed = [], False
        for fault in list(self._faults):
            if fault.until is not None and now >= fault.until:
                self._faults.remove(fault)
                changed = True
                continue
            if not _matches(fault, call):
                continue
            if fault.skip:
                fault.skip -= 1
                changed = True
                continue
            taken.append(fault)
            if fault.times is not None:
                fault.times -= 1
                changed = True
                if not fault.times:
                    self._faults.remove(fault)
        if changed:
            self._save(self.dump())
        return taken


def _matches(fault: Fault, call: Call) -> bool:
    return (
        fault.verb in ("*", call.verb)
        and fault.region in (None, call.region)
        and (fault.path is None or re.search(fault.path, call.path) is not None)
        and (fault.name is None or fault.name in call.name)
    )
