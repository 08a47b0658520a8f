"""What a cloud may do to our next calls, drawn at random: the simulators' own faults, of every kind."""

import random
from typing import Any

# The common ones stand twice. A kind that makes sense for one call only names it.
_KINDS = (
    ("lost", None),
    ("lost", None),
    ("cut", None),
    ("status", None),
    ("status", None),
    ("error_body", None),
    ("garbage", None),
    ("throttle", None),
    ("hide", "list"),
    ("truncate", "list"),
    ("foreign", "list"),
    ("refuse", "create"),
    ("expired", None),
    ("ignored", "terminate"),
    ("slow", None),
    ("phantom", "create"),
)
_VERBS = ("create", "create", "list", "get", "terminate", "terminate")


def cloud_fault(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Kind and fields of `providers.simulation.faults.Fault`, for one to four calls."""
    kind, verb = rng.choice(_KINDS)
    fields: dict[str, Any] = {"verb": verb or rng.choice(_VERBS), "times": rng.randint(1, 4)}
    if kind == "status":
        fields |= {"when": rng.choice(["before", "after"]), "status": rng.choice([500, 502, 503])}
    if kind == "throttle":
        fields |= {"retry_after_s": 0.2}
    if kind == "slow":
        fields |= {"delay_s": rng.choice([0.5, 3.0])}
    if kind == "refuse":
        fields |= {"code": rng.choice(["capacity", "quota"])}
    if kind in ("lost", "status"):
        fields |= {"skip": rng.randint(0, 2)}
    return kind, fields
