"""References of the form ``$(NAME)`` in a container's environment, command and arguments.

The rules are the kubelet's: an unknown name stays as it is written, ``$$`` is one dollar sign (``$$(NAME)``
gives ``$(NAME)``), a parenthesis that is never closed is plain text, and what was put in is not read again.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, names: Mapping[str, str]) -> str:
    """``text`` with every reference to one of ``names`` replaced by its value."""
    if "$" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] else names.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def literal_environment(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The environment of literal ``env`` entries: each sees those before it; the last of a name wins."""
    env: dict[str, str] = {}
    for entry in entries:
        env[entry["name"]] = expand(entry.get("value") or "", env)
    return env
