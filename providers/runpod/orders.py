"""A workload -> RunPod's create request, and what RunPod can never run. Pure."""

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

import orjson

from providers.base import Attempt, EgressMode, Offering, OptionSpec, Workload
from providers.runpod.client import BODY_BYTES_MAX
from providers.runpod.wire import DISK_VARIABLE, IDENTITY_VARIABLE, JOB_VARIABLE

COMMUNITY: Final = "community/"
"""Begins the shape of a card that is rented from the marketplace of hosts; RunPod's own id follows."""

END_MARK: Final = "nebula-exit"
REPORTER: Final = f'"$@"; code=$?; while :; do echo "{END_MARK} ${IDENTITY_VARIABLE} $code"; sleep 30; done'
"""Says again and again how it ended: RunPod would start the command anew if its shell ended, too."""

REGION_JOIN: Final = "|"
REGISTRY_PIN: Final = "registry"
DISK_GB_DEFAULT = 20
_GB = 10**9
_ENV_MAX = 50
_ENV_OURS = 3
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
    if len(workload.env) > _ENV_MAX - _ENV_OURS:
        return (
            f"env has {len(workload.env)} variables, and RunPod takes {_ENV_MAX - _ENV_OURS}:"
            " leave some out, and set enableServiceLinks to false"
        )
    for name in workload.env:
        if name.upper().startswith("RUNPOD_") or name in (IDENTITY_VARIABLE, DISK_VARIABLE, JOB_VARIABLE):
            return f"env {name} is not for workloads on RunPod: use another name"
        if not name or any(sign in name for sign in "=\0"):
            return f"env {name!r} is not a name of a variable"
    if reports(workload) and not workload.command:
        return "option job=report needs the container's command: what the image would run is not known"
    http = http_ports(workload)
    if strangers := sorted(http - set(workload.ports)):
        return f"option http-ports names port {strangers[0]}, which is not among the container's ports"
    if len(http) > _HTTP_PORTS_MAX:
        return f"option http-ports names {len(http)} ports, and RunPod's proxy takes {_HTTP_PORTS_MAX}"
    size = len(_dumped(_container(workload, env=workload.env))) + 6 * _NAME_BYTES
    if size > BODY_BYTES_MAX:
        return (
            f"env, command and args take {size} bytes, and RunPod takes {BODY_BYTES_MAX}: make them shorter"
        )
    return None


def reports(workload: Workload) -> bool:
    """Whether its exit code is to be told, by a shell that stays when the command has ended."""
    return workload.options.get("job") == "report"


def http_ports(workload: Workload) -> frozenset[int]:
    return frozenset(int(port) for port in workload.options.get("http-ports", "").split(";") if port)


def regions_of(region: str) -> list[str]:
    """The data centres of a region token; RunPod takes lower case, and then places anywhere."""
    return [part.strip().upper() for part in region.split(REGION_JOIN) if part.strip()]


def order(attempt: Attempt, workload: Workload, *, offering: Offering) -> dict[str, Any]:
    """The body of the create. The identity is in it twice: people rename pods in the console."""
    disk = disk_gb(workload)
    env = dict(workload.env) | {IDENTITY_VARIABLE: attempt.identity, DISK_VARIABLE: str(disk)}
    if reports(workload):
        env[JOB_VARIABLE] = "report"
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
    if workload.ports:
        body["ports"] = [f"{port}/{'http' if port in http else 'tcp'}" for port in workload.ports]
    if reports(workload):
        body["entrypoint"] = ["/bin/sh", "-c", REPORTER, "nebula", *workload.command, *workload.args]
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
