"""What an account asked of the API server, by the audit log, held against what its roles grant."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Right = tuple[str, str, str]  # API group, resource with its subresource, verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The rights that were used and given, and the requests that were forbidden, as sentences."""

    rights: frozenset[Right]
    forbidden: tuple[str, ...]


def used(audit_log: Path, *, account: str) -> Used:
    """Read the whole log; ``account`` is the user's name as the API server has it."""
    rights, forbidden = set(), []
    with audit_log.open() as lines:
        for line in lines:
            event = json.loads(line)
            if event["user"].get("username") != account or "objectRef" not in event:
                continue
            at = event["objectRef"]
            name = "/".join(filter(None, (at.get("resource", ""), at.get("subresource", ""))))
            if (event.get("responseStatus") or {}).get("code") == 403:
                forbidden.append(f"{event['verb']} {event['requestURI']}")
            else:
                rights.add((at.get("apiGroup", ""), name, event["verb"]))
    return Used(rights=frozenset(rights), forbidden=tuple(forbidden))


def granted(roles: Iterable[dict[str, Any]]) -> frozenset[Right]:
    """All that these roles and cluster roles allow together."""
    return frozenset(
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )
