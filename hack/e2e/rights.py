"""What an account asked of the API server, by the audit log, held against what its roles grant."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Right(NamedTuple):
    """A verb on a resource with its subresource; ``namespace`` empty: by a ClusterRole, so in every one."""

    namespace: str
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        name = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {name} {f'in {self.namespace}' if self.namespace else 'cluster-wide'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The rights that were used and given, and the requests that were forbidden, as sentences."""

    rights: frozenset[Right]
    forbidden: tuple[str, ...]


def used(audit_log: Path, *, account: str, given: frozenset[Right]) -> Used:
    """Read the whole log; ``account`` is the user's name as the API server has it.

    A request in a namespace that has such a right of its own has used that one, and not the cluster-wide one.
    """
    rights: set[Right] = set()
    forbidden = []
    with audit_log.open() as lines:
        for line in lines:
            if account not in line:  # the log of a long run is large, and most of it others'
                continue
            event = json.loads(line)
            if event["user"].get("username") != account or "objectRef" not in event:
                continue
            at = event["objectRef"]
            name = "/".join(filter(None, (at.get("resource", ""), at.get("subresource", ""))))
            if (event.get("responseStatus") or {}).get("code") == 403:
                forbidden.append(f"{event['verb']} {event['requestURI']}")
                continue
            right = Right(at.get("namespace", ""), at.get("apiGroup", ""), name, event["verb"])
            rights.add(right if right in given else right._replace(namespace=""))
    return Used(rights=frozenset(rights), forbidden=tuple(forbidden))


def granted(roles: Iterable[dict[str, Any]]) -> frozenset[Right]:
    """All that these roles and cluster roles allow together."""
    return frozenset(
        Right(role["metadata"].get("namespace", ""), group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )
