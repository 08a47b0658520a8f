"""A workload -> RunPod's create request, and what RunPod can never run. Pure."""

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

import orjson

from providers.base import Access, Attempt, EgressMode, Offering, OptionSpec, Workload
from providers.runpod.client import BODY_BYTES_MAX
from providers.runpod.machines import SSH_ADDED, SSH_PORT
from providers.runpod.wire import (
    DISK_VARIABLE,
    IDENTITY_VARIABLE,
    JOB_VARIABLE,
    PUBLIC_KEY_VARIABLE,
    SENT_VARIABLE,
    SSH_VARIABLE,
)

COMMUNITY: Final = "community/"
"""Begins the shape of a card that is rented from the marketplace of hosts; RunPod's own id follows."""

END_MARK: Final = "nebula-exit"
REPORTER: Final = f'"$@"; code=$?; while :; do echo "{END_MARK} ${IDENTITY_VARIABLE} $code"; sleep 30; done'
"""Says again and again how it ended: RunPod would start the command anew if its shell ended, too."""

SSHD: Final = (
    "mkdir -p ~/.ssh /run/sshd && chmod 700 ~/.ssh"
    f' && printf "%s\\n" "${PUBLIC_KEY_VARIABLE}" >>~/.ssh/authorized_keys'
    " && chmod 600 ~/.ssh/authorized_keys"
    ' && ssh-keygen -A >/dev/null && "$(command -v sshd || echo /usr/sbin/sshd)"'
    ' || echo "nebula: the image has no sshd that can be started" >&2; exec "$@"'
)
"""Starts the image's sshd in the background, and becomes the command: PID 1, as it would be without."""

REGION_JOIN: Final = "|"
REGISTRY_PIN: Final = "registry"
DISK_GB_DEFAULT = 20
_GB = 10**9
_RESERVED = (IDENTITY_VARIABLE, DISK_VARIABLE, JOB_VARIABLE, SENT_VARIABLE, SSH_VARIABLE)
_ENV_MAX = 50
_ENV_OURS = 4
_ENV_SSH = 2
_SSH_BYTES = 200
_HTTP_PORTS_MAX = 10
_NAME_BYTES = 80  # of an identity, and of a registry's id

OPTIONS: Final = (
    OptionSpec(
        name="cloud",
        meaning="secure (data centres) or community (a marketplace of hosts, cheaper, and in no region).",
        pattern=r"(?i:secure|community)",
    ),
    OptionSpec(
        name="disk-gb",
        meaning="GB of container disk, where the Pod asks for no ephemeral storage.",
        pattern=r"[1-9][0-9]{0,4}",
        default=str(DISK_GB_DEFAULT),
    ),
    OptionSpec(
        name="cuda-min",
        meaning="The least CUDA version that the host's driver must have, such as 12.8.",
        pattern=r"[0-9]{1,2}\.[0-9]{1,2}",
    ),
    OptionSpec(
        name="job",
        meaning="report: the image's /bin/sh runs command and args, and tells their exit code in the log.",
        pattern=r"report",
    ),
    OptionSpec(
        name="ssh",
        meaning="For kubectl exec. image: the image starts sshd by itself, with the key in PUBLIC_KEY."
        " start: the image's /bin/sh starts its sshd before the container's command.",
        pattern=r"image|start",
    ),
    OptionSpec(
        name="http-ports",
        meaning="Ports to serve through RunPod's public https proxy, apart by semicolons; others are TCP.",
        pattern=r"[0-9]{1,5}(;[0-9]{1,5})*",
    ),
)


def wants_community(options: Mapping[str, str], *, default: str) -> bool:
    return options.get("cloud", default).lower() == "community"


def disk_gb(workload: Workload) -> int:
    """Decimal gigabytes, rounded up: RunPod takes no request without a disk."""
    if workload.disk_bytes is not None:
        return max(1, -(-workload.disk_bytes // _GB))
    return int(workload.options.get("disk-gb") or DISK_GB_DEFAULT)


def impossible(workload: Workload) -> str | None:
    """Why RunPod can never run it, naming the field and the fix."""
    if workload.egress.mode is not EgressMode.OPEN:
        return f"egress {workload.egress.mode} cannot be enforced on RunPod: use Open, or another provider"
    if not workload.image:
        return "image must not be empty"
    if workload.working_dir is not None:
        return "workingDir cannot be set on RunPod: change the directory in command, or in the image"
    most = _ENV_MAX - _ENV_OURS - (_ENV_SSH if wants_ssh(workload) else 0)
    if len(workload.env) > most:
        return (
            f"env has {len(workload.env)} variables, and RunPod takes {most}:"
            " leave some out, and set enableServiceLinks to false"
        )
    for name in workload.env:
        if name.upper().startswith("RUNPOD_") or name in _RESERVED:
            return f"env {name} is not for workloads on RunPod: use another name"
        if not name or any(sign in name for sign in "=\0"):
            return f"env {name!r} is not a name of a variable"
    if unfit := _no_ssh(workload):
        return unfit
    if reports(workload) and not workload.command:
        return "option job=report needs the container's command: what the image would run is not known"
    http = http_ports(workload)
    if strangers := sorted(http - set(workload.ports)):
        return f"option http-ports names port {strangers[0]}, which is not among the container's ports"
    if len(http) > _HTTP_PORTS_MAX:
        return f"option http-ports names {len(http)} ports, and RunPod's proxy takes {_HTTP_PORTS_MAX}"
    size = len(_dumped(_container(workload, env=workload.env))) + 6 * _NAME_BYTES
    size += _SSH_BYTES if wants_ssh(workload) else 0
    if size > BODY_BYTES_MAX:
        return (
            f"env, command and args take {size} bytes, and RunPod takes {BODY_BYTES_MAX}: make them shorter"
        )
    return None


def reports(workload: Workload) -> bool:
    """Whether its exit code is to be told, by a shell that stays when the command has ended."""
    return workload.options.get("job") == "report"


def wants_ssh(workload: Workload) -> bool:
    return "ssh" in workload.options


def _no_ssh(workload: Workload) -> str | None:
    """Why the way in that was asked for cannot be had."""
    if not wants_ssh(workload):
        return None
    if workload.options["ssh"] == "start" and not workload.command:
        return "option ssh=start needs the container's command: what the image would run is not known"
    if SSH_PORT in http_ports(workload):
        return "option ssh needs port 22 as TCP: take it out of option http-ports"
    if PUBLIC_KEY_VARIABLE in workload.env:
        return f"env {PUBLIC_KEY_VARIABLE} is ours where option ssh is given: leave either out"
    return None


def http_ports(workload: Workload) -> frozenset[int]:
    return frozenset(int(port) for port in workload.options.get("http-ports", "").split(";") if port)


def regions_of(region: str) -> list[str]:
    """The data centres of a region token; RunPod takes lower case, and then places anywhere."""
    return [part.strip().upper() for part in region.split(REGION_JOIN) if part.strip()]


def order(
    attempt: Attempt, workload: Workload, *, offering: Offering, at: int, access: Access | None = None
) -> dict[str, Any]:
    """The body of the create. The identity is in it twice: people rename pods in the console.

    ``at`` is when it is sent, in seconds since 1970, by the cloud's clock: ``createdAt`` is held against it.
    """
    disk = disk_gb(workload)
    env = dict(workload.env) | {IDENTITY_VARIABLE: attempt.identity, DISK_VARIABLE: str(disk)}
    env[SENT_VARIABLE] = str(at)
    if reports(workload):
        env[JOB_VARIABLE] = "report"
    if wants_ssh(workload) and access is not None:
        # Not RunPod's own startSsh: that would let in every key that people have put into the account.
        env[PUBLIC_KEY_VARIABLE] = access.ssh_public_key
        env[SSH_VARIABLE] = "own" if SSH_PORT in workload.ports else SSH_ADDED
    gpu: dict[str, Any] = {
        "id": offering.shape.removeprefix(COMMUNITY),
        "count": offering.accelerator.count if offering.accelerator else 1,
    }
    gpu |= _floors(workload, count=gpu["count"])
    if cuda := workload.options.get("cuda-min"):
        gpu["minCudaVersion"] = cuda
    body = _container(workload, env=env) | {
        "name": attempt.identity,
        "gpu": gpu,
        "cloud": "COMMUNITY" if offering.shape.startswith(COMMUNITY) else "SECURE",
        "disk": disk,
    }
    if regions := regions_of(attempt.region):
        body["dataCenterIds"] = regions
    if registry := attempt.pins.get(REGISTRY_PIN):
        body["registry"] = registry
    return body


def _container(workload: Workload, *, env: Mapping[str, str]) -> dict[str, Any]:
    """What does not depend on the attempt. Exec form: RunPod's ``args`` would be split like a shell's."""
    http = http_ports(workload)
    body: dict[str, Any] = {"image": workload.image, "env": dict(env)}
    ports = list(workload.ports)
    if wants_ssh(workload) and SSH_PORT not in ports:
        ports.append(SSH_PORT)
    if ports:
        body["ports"] = [f"{port}/{'http' if port in http else 'tcp'}" for port in ports]
    starts = ["/bin/sh", "-c", SSHD, "nebula"] if workload.options.get("ssh") == "start" else []
    if reports(workload):
        command = ["/bin/sh", "-c", REPORTER, "nebula", *workload.command, *workload.args]
        body["entrypoint"] = [*starts, *command]
        return body
    if starts:
        body["entrypoint"] = [*starts, *workload.command, *workload.args]
        return body
    if workload.command:
        body["entrypoint"] = list(workload.command)
    if workload.args:
        body["cmd"] = list(workload.args)
    return body


def _floors(workload: Workload, *, count: int) -> dict[str, int]:
    """Cores and memory come with the cards; a request can only say how much of them there must be."""
    floors = {}
    if workload.cpu is not None:
        floors["minVcpuCountPerGpu"] = _per_gpu(workload.cpu, count)
    if workload.memory_bytes is not None:
        floors["minRamPerGpu"] = _per_gpu(Decimal(workload.memory_bytes) / _GB, count)
    return floors


def _per_gpu(amount: Decimal, count: int) -> int:
    return max(1, int((amount / count).to_integral_value(ROUND_CEILING)))


def _dumped(body: Any) -> bytes:
    return orjson.dumps(body)
