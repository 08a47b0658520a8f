"""A Pod's one container, as a cloud needs it."""

from collections.abc import Mapping
from typing import Any

from app.api.keys import DEAD_MAN_ANNOTATION, DEAD_MAN_OFF
from app.workload.amounts import amounts_of
from app.workload.environment import Environment
from app.workload.expansion import expand
from app.workload.probes import needs_commands
from app.workload.shapes import unsupported
from providers.base import Accelerator, Workload

_DEFAULT_GRACE_S = 30  # what the API server fills in


def build(
    pod: Mapping[str, Any],
    *,
    environment: Environment,
    accelerator: Accelerator | None,
    options: Mapping[str, str],
) -> Workload:
    """What to run for this Pod. ``accelerator`` and ``options`` are the claim's, not read from the Pod again.

    ``environment`` is the container's, composed already; command and arguments see the whole of it. Amounts
    are the container's limit, and its request only where there is no limit. Egress policy and registry login
    are the caller's to add (`dataclasses.replace`).

    Raises:
        Unsupported: the Pod asks for something that cannot be done; the first of `refusals`, in field order.
    """
    if found := unsupported(pod):
        raise found[0]
    spec = pod["spec"]
    container = spec["containers"][0]
    amounts = amounts_of(container)
    env = environment.variables
    ports = (port["containerPort"] for port in container.get("ports") or ())
    return Workload(
        image=container["image"],
        command=tuple(expand(word, env) for word in container.get("command") or ()),
        args=tuple(expand(word, env) for word in container.get("args") or ()),
        env=dict(env),
        secret_env=environment.secret,
        ports=tuple(dict.fromkeys(ports)),
        working_dir=container.get("workingDir") or None,
        cpu=amounts.cpu,
        memory_bytes=amounts.memory_bytes,
        disk_bytes=amounts.disk_bytes,
        accelerator=accelerator,
        restart_policy=spec.get("restartPolicy") or "Always",
        grace_s=_or(spec.get("terminationGracePeriodSeconds"), _DEFAULT_GRACE_S),
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        options=dict(options),
        needs_commands=needs_commands(container),
        stdin=bool(container.get("stdin")),
        stdin_once=bool(container.get("stdinOnce")),
        terminal=bool(container.get("tty")),
        dead_man=_dead_man(pod),
    )


def _dead_man(pod: Mapping[str, Any]) -> bool:
    """For what is meant to end, unless its author says no; a service is never ended by a limit."""
    annotations = pod["metadata"].get("annotations") or {}
    batch = (pod["spec"].get("restartPolicy") or "Always") != "Always"
    return batch and annotations.get(DEAD_MAN_ANNOTATION) != DEAD_MAN_OFF


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
