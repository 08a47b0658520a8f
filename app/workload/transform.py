"""A Pod's one container, as a cloud needs it."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from app.api.quantities import parse_bytes, parse_quantity
from app.workload.expansion import expand, literal_environment
from app.workload.shapes import Unsupported, unsupported
from providers.base import Accelerator, Workload

_DEFAULT_GRACE_S = 30  # what the API server fills in
_T = TypeVar("_T", int, Decimal)


def build(pod: Mapping[str, Any], *, accelerator: Accelerator | None, options: Mapping[str, str]) -> Workload:
    """What to run for this Pod. ``accelerator`` and ``options`` are the claim's, not read from the Pod again.

    Amounts are the container's limit, and its request only where there is no limit. Egress policy and
    registry login are the caller's to add (`dataclasses.replace`).

    Raises:
        Unsupported: the Pod asks for something that cannot be done; the first of `refusals`, in field order.
    """
    if found := unsupported(pod):
        raise found[0]
    spec = pod["spec"]
    container = spec["containers"][0]
    env = literal_environment(container.get("env") or ())
    ports = (port["containerPort"] for port in container.get("ports") or ())
    return Workload(
        image=container["image"],
        command=tuple(expand(word, env) for word in container.get("command") or ()),
        args=tuple(expand(word, env) for word in container.get("args") or ()),
        env=env,
        ports=tuple(dict.fromkeys(ports)),
        working_dir=container.get("workingDir") or None,
        cpu=_amount(container, "cpu", parse_quantity),
        memory_bytes=_amount(container, "memory", parse_bytes),
        disk_bytes=_amount(container, "ephemeral-storage", parse_bytes),
        accelerator=accelerator,
        restart_policy=spec.get("restartPolicy") or "Always",
        grace_s=_or(spec.get("terminationGracePeriodSeconds"), _DEFAULT_GRACE_S),
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        options=dict(options),
    )


def _amount(container: Mapping[str, Any], name: str, parse: Callable[[str | int], _T]) -> _T | None:
    """The amount asked for; none when it is nothing or not said."""
    resources = container.get("resources") or {}
    text = _or((resources.get("limits") or {}).get(name), (resources.get("requests") or {}).get(name))
    if text is None:
        return None
    try:
        return parse(text) or None
    except ValueError as error:
        field = f"spec.containers[{container.get('name')}].resources[{name}]"
        raise Unsupported(field, f"{field} cannot be read: {error}") from error


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
