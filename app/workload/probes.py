"""A container's probes, checked and with their ports resolved; and which of them are refused. Pure.

Http and tcp are asked from outside, at the machine's endpoint, so only on a port that the container declares.
A command needs a cloud that runs one in its machines (`needs_commands`). Another host is never asked: a Pod's
author would make the controller talk to any address it can reach.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ProbeKind(StrEnum):
    """The three probes, by the word that messages begin with."""

    STARTUP = "Startup"
    READINESS = "Readiness"
    LIVENESS = "Liveness"

    @property
    def field(self) -> str:
        return f"{self.value.lower()}Probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGet:
    """``headers`` may hold a credential: they are in no ``repr``."""

    port: int
    path: str
    scheme: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpConnect:
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exec:
    """``command`` may hold a credential: it is in no ``repr``."""

    command: tuple[str, ...] = field(repr=False)


Action = HttpGet | TcpConnect | Exec


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe; the defaults are the API server's."""

    kind: ProbeKind
    action: Action
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    successes: int = 1
    failures: int = 3
    grace_s: float | None = None
    """How long a workload that it finds dead may take to stop; None: as long as its Pod says."""


def probes(container: Mapping[str, Any]) -> tuple[Probe, ...]:
    """The probes of a container that `refusals` accepts; startup first."""
    found = []
    for kind in ProbeKind:
        spec = container.get(kind.field)
        if not spec:
            continue
        grace_s = spec.get("terminationGracePeriodSeconds")
        found.append(
            Probe(
                kind=kind,
                action=_action(container, spec),
                initial_delay_s=float(spec.get("initialDelaySeconds") or 0),
                period_s=float(spec.get("periodSeconds") or 10),
                timeout_s=float(spec.get("timeoutSeconds") or 1),
                successes=int(spec.get("successThreshold") or 1),
                failures=int(spec.get("failureThreshold") or 3),
                grace_s=None if grace_s is None else float(grace_s),
            )
        )
    return tuple(found)


def refusals(container: Mapping[str, Any], field: str) -> Iterator[tuple[str, str]]:
    """The path of each probe that cannot be made, and the rest of the sentence."""
    for kind in ProbeKind:
        spec = container.get(kind.field)
        if not spec:
            continue
        path = f"{field}.{kind.field}"
        if "exec" in spec:
            if not (spec["exec"] or {}).get("command"):
                yield f"{path}.exec.command", "is empty: name the command that is to be run"
        elif "grpc" in spec:
            yield f"{path}.grpc", "is not supported by this version of Nebula: use httpGet, tcpSocket or exec"
        else:
            name = "httpGet" if "httpGet" in spec else "tcpSocket"
            handler = spec.get(name) or {}
            if handler.get("host"):
                yield f"{path}.{name}.host", "cannot be set: only the Pod's own machine is probed; remove it"
            if _port(container, handler.get("port")) is None:
                yield (
                    f"{path}.{name}.port",
                    f"is {handler.get('port')}, which is no port of the container: it could not be reached"
                    " from outside; add it to ports",
                )


def needs_commands(container: Mapping[str, Any]) -> bool:
    """Whether a probe, or the hook before its end, runs a command beside the workload."""
    hook = (container.get("lifecycle") or {}).get("preStop") or {}
    return bool(hook.get("exec")) or any("exec" in (container.get(kind.field) or {}) for kind in ProbeKind)


def _action(container: Mapping[str, Any], spec: Mapping[str, Any]) -> Action:
    if (run := spec.get("exec")) is not None:
        return Exec(command=tuple(run["command"]))
    if (get := spec.get("httpGet")) is not None:
        path = get.get("path") or "/"
        return HttpGet(
            port=_port(container, get["port"]) or 0,
            path=path if path.startswith("/") else f"/{path}",
            scheme=(get.get("scheme") or "HTTP").lower(),
            headers=tuple((each["name"], each.get("value") or "") for each in get.get("httpHeaders") or ()),
        )
    return TcpConnect(port=_port(container, spec["tcpSocket"]["port"]) or 0)


def _port(container: Mapping[str, Any], wanted: Any) -> int | None:
    """The number of a port that the container declares, by its number or name."""
    for port in container.get("ports") or ():
        number = int(port["containerPort"])
        if wanted in (number, str(number)) or (wanted and wanted == port.get("name")):
            return number
    return None
