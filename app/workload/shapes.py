"""What a Pod may not ask for, and what to do about it: one table of fields, and the few rules that need code.

A field that is neither refused nor handed to the cloud has no effect on what runs: it speaks to the
scheduler (affinity, priority, spread), or of a service account or node that the machine does not have.
Restrictions that protect a node from its containers are let through, some with a warning: the machine is the
Pod's alone, and a namespace of the restricted Pod security level would otherwise be shut out.

Building what a row refuses means deleting the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.api.keys import GPU_RESOURCE
from app.workload import environment, probes

EACH: Final = "*"  # in a path: every entry of the list

_LATER = "is not supported by this version of Nebula"
_NEVER = "cannot be had on a rented machine"


class Unsupported(ValueError):
    """The Pod's shape cannot run on a rented machine. ``field`` is its path in the Pod."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One field, from ``spec`` down. Unset (absent, false, empty) it passes, and so do ``accepted`` values.

    ``why`` is the rest of the sentence that begins with the field's name: the reason, and the way out.
    """

    path: tuple[str, ...]
    why: str
    accepted: tuple[Any, ...] = ()

    @property
    def in_container(self) -> str | None:
        """The field of a container that the path begins with, if it leads into one."""
        return self.path[2] if self.path[:2] == ("containers", EACH) else None


def _row(path: str, why: str, *accepted: Any) -> Refused:
    return Refused(path=tuple(path.split(".")), why=why, accepted=accepted)


REFUSED: Final = (
    _row("initContainers", f"{_LATER}: nothing would run before the container; do their work in its command"),
    _row("ephemeralContainers", f"{_NEVER}: remove them"),
    _row("hostNetwork", f"{_NEVER}: there is no node whose network could be shared; remove it"),
    _row("hostPID", f"{_NEVER}: there is no node whose processes could be seen; remove it"),
    _row("hostIPC", f"{_NEVER}: there is no node whose memory could be shared; remove it"),
    _row("runtimeClassName", f"{_NEVER}: the cloud chooses the runtime; remove it"),
    _row("resourceClaims", f"{_NEVER}: devices are asked for by {GPU_RESOURCE} and a label; remove it"),
    _row("resources", f"{_LATER}: the size would be ignored; set the container's resources instead"),
    _row("hostAliases", f"{_LATER}: the names would not resolve; remove them"),
    _row("dnsConfig", f"{_LATER}: names would resolve in another way; remove it"),
    _row("os.name", f"{_NEVER} other than linux", "linux"),
    _row("securityContext.runAsUser", f"{_LATER}: the image's own user would run; remove it"),
    _row("securityContext.runAsGroup", f"{_LATER}: the image's own group would run; remove it"),
    _row("securityContext.supplementalGroups", f"{_LATER}: the groups would be missing; remove them"),
    _row("securityContext.sysctls", f"{_LATER}: they would not be set; remove them"),
    _row("securityContext.seLinuxOptions", f"{_NEVER}: remove them"),
    _row("securityContext.windowsOptions", f"{_NEVER}: remove them"),
    _row(
        "securityContext.seccompProfile.type",
        f"{_NEVER} from a file of a node; use RuntimeDefault",
        "RuntimeDefault",
        "Unconfined",
    ),
    _row(
        "securityContext.appArmorProfile.type",
        f"{_NEVER} from a node; use RuntimeDefault",
        "RuntimeDefault",
        "Unconfined",
    ),
    _row(
        "containers.*.imagePullPolicy",
        f"{_NEVER} as Never: no image is there before it is pulled; use IfNotPresent",
        "Always",
        "IfNotPresent",
    ),
    _row("containers.*.lifecycle.postStart", f"{_LATER}: the hook would not run; remove it"),
    _row("containers.*.lifecycle.preStop.httpGet", f"{_LATER}: the hook would not run; use exec or sleep"),
    _row("containers.*.lifecycle.preStop.tcpSocket", f"{_NEVER}: it does nothing; use sleep"),
    _row("containers.*.lifecycle.stopSignal", f"{_LATER}: the cloud's own signal would be sent; remove it"),
    _row("containers.*.restartPolicy", f"{_LATER}: use the Pod's own restartPolicy"),
    _row("containers.*.restartPolicyRules", f"{_LATER}: use the Pod's own restartPolicy"),
    _row("containers.*.ports.*.hostPort", f"{_NEVER}: there is no node with that port; use containerPort"),
    _row("containers.*.ports.*.protocol", f"{_NEVER} other than TCP: the port would not be reachable", "TCP"),
    _row(
        "containers.*.resources.claims",
        f"{_NEVER}: devices are asked for by {GPU_RESOURCE} and a label; remove them",
    ),
    _row("containers.*.volumeDevices", f"{_NEVER}: there is no storage of the cluster; remove them"),
    _row("containers.*.securityContext.privileged", f"{_NEVER}: remove it"),
    _row(
        "containers.*.securityContext.capabilities.add",
        f"{_NEVER} beyond the runtime's own; remove them",
        [],
        ["NET_BIND_SERVICE"],
    ),
    _row("containers.*.securityContext.procMount", f"{_NEVER} other than Default", "Default"),
    _row("containers.*.securityContext.readOnlyRootFilesystem", f"{_LATER}: it would be writable; remove it"),
    _row("containers.*.securityContext.runAsUser", f"{_LATER}: the image's own user would run; remove it"),
    _row("containers.*.securityContext.runAsGroup", f"{_LATER}: the image's own group would run; remove it"),
    _row("containers.*.securityContext.seLinuxOptions", f"{_NEVER}: remove them"),
    _row("containers.*.securityContext.windowsOptions", f"{_NEVER}: remove them"),
    _row(
        "containers.*.securityContext.seccompProfile.type",
        f"{_NEVER} from a file of a node; use RuntimeDefault",
        "RuntimeDefault",
        "Unconfined",
    ),
    _row(
        "containers.*.securityContext.appArmorProfile.type",
        f"{_NEVER} from a node; use RuntimeDefault",
        "RuntimeDefault",
        "Unconfined",
    ),
)
"""Every field that is refused when it is set."""

NOT_ENFORCED: Final = (
    ("securityContext", "runAsNonRoot"),
    ("containers", EACH, "securityContext", "runAsNonRoot"),
    ("containers", EACH, "securityContext", "capabilities", "drop"),
)
"""Fields that are let through, with a warning, although the machine may not keep to them."""

_VOLUMES: Final = {
    "hostPath": f"{_NEVER}: there is no node with that path",
    "persistentVolumeClaim": f"{_NEVER}: the cluster's storage is not reachable from there",
    "ephemeral": f"{_NEVER}: the cluster's storage is not reachable from there",
    "csi": f"{_NEVER}: the cluster's storage is not reachable from there",
}
_RESOURCES: Final = frozenset({"cpu", "memory", "ephemeral-storage", GPU_RESOURCE})
_TOKEN_VOLUME = "kube-api-access-"  # how the API server names the volume that it adds to every Pod
_ROOT_CA = "kube-root-ca.crt"
_TOKEN_SOURCES = frozenset({"serviceAccountToken", "configMap", "downwardAPI"})


def refusals(pod: Mapping[str, Any]) -> list[str]:
    """Every reason why a Pod of this shape cannot run on a rented machine: the field, and what to do."""
    return [str(each) for each in unsupported(pod)]


def unsupported(pod: Mapping[str, Any]) -> list[Unsupported]:
    """As `refusals`, with the fields apart."""
    found = [Unsupported(field, f"{field} {why}") for field, why in _reasons(pod)]
    return sorted(found, key=lambda each: each.field)


def warnings(pod: Mapping[str, Any]) -> list[str]:
    """What the Pod's author should know although it may run."""
    spec = pod.get("spec") or {}
    fields = [field for path in NOT_ENFORCED for field, value in _at(spec, path, "spec") if not _unset(value)]
    if not fields:
        return []
    return [f"not enforced on a rented machine, which is the Pod's alone: {', '.join(fields)}"]


def _reasons(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    spec = pod.get("spec") or {}
    containers: Sequence[Mapping[str, Any]] = spec.get("containers") or ()
    set_in_containers = {name for container in containers for name in container}
    for row in REFUSED:
        # Walking along every path took most of a review: a Pod sets a tenth of these fields.
        if row.path[0] not in spec or (row.in_container and row.in_container not in set_in_containers):
            continue
        for field, value in _at(spec, row.path, "spec"):
            if not _unset(value) and value not in row.accepted:
                yield field, row.why
    for container in containers[1:]:
        yield (
            f"spec.containers[{container.get('name')}]",
            f"{_LATER}: one Pod is one container; run it in a Pod of its own, or turn off what injects it",
        )
    for volume in spec.get("volumes") or ():
        if not _is_token(volume):
            kind = next((key for key in volume if key != "name"), "emptyDir")
            why = _VOLUMES.get(kind, f"{_LATER}: what it holds would be missing")
            yield f"spec.volumes[{volume.get('name')}].{kind}", f"{why}; remove it"
    for container in containers:
        field = f"spec.containers[{container.get('name')}]"
        yield from environment.refusals(pod, container, field)
        yield from probes.refusals(container, field)
        resources = container.get("resources") or {}
        names = {name for part in ("limits", "requests") for name in resources.get(part) or {}}
        for name in names - _RESOURCES:
            yield (
                f"{field}.resources[{name}]",
                f"{_NEVER}: only {', '.join(sorted(_RESOURCES))} can be asked for; remove it",
            )


def _is_token(volume: Mapping[str, Any]) -> bool:
    """Whether it is the volume that the API server adds for the service account: no machine gets it.

    A token for another audience, or another ConfigMap, was asked for by somebody, whatever the volume's name.
    """
    sources = (volume.get("projected") or {}).get("sources") or ()
    kinds = {kind for source in sources for kind in source}
    named = str(volume.get("name", "")).startswith(_TOKEN_VOLUME)
    own = all(
        not (source.get("serviceAccountToken") or {}).get("audience")
        and (source.get("configMap") or {}).get("name", _ROOT_CA) == _ROOT_CA
        for source in sources
    )
    return named and own and "serviceAccountToken" in kinds and kinds <= _TOKEN_SOURCES


def _at(node: Any, path: Sequence[str], field: str) -> Iterator[tuple[str, Any]]:
    """Every value at the path, with its name for people: ``spec.containers[main].env[HOME].valueFrom``."""
    if not path:
        yield field, node
        return
    name, rest = path[0], path[1:]
    if name == EACH:
        for index, entry in enumerate(node if isinstance(node, list) else ()):
            label = entry.get("name") if isinstance(entry, dict) else None
            yield from _at(entry, rest, f"{field}[{index if label is None else label}]")
    elif isinstance(node, Mapping) and name in node:
        yield from _at(node[name], rest, f"{field}.{name}")


def _unset(value: Any) -> bool:
    """Zero is a value: a user, a group, a port of that number."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)
