"""References of the form ``$(NAME)`` in a container's environment, command and arguments.

The rules are the kubelet's: an unknown name stays as it is written, ``$$`` is one dollar sign (``$$(NAME)``
gives ``$(NAME)``), a parenthesis that is never closed is plain text, and what was put in is not read again.
"""

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, names: Mapping[str, str]) -> str:
    """``text`` with every reference to one of ``names`` replaced by its value."""
    if "$" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] else names.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def referenced(text: str) -> frozenset[str]:
    """The names that ``text`` refers to, known or not."""
    return frozenset(match[2] for match in _REFERENCE.finditer(text) if not match[1])
