"""Keys that look like ours and are none: ignored, a ceiling would not hold and an accelerator not be rented.

The group of our own kinds is ours alone, so every unknown key in it is refused. ``cloud.aibrix.ai`` also
holds the options of clouds that may not be configured here: of it only what is nearly the ceiling's name is.
"""

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Final

from app.api import keys

_LABELS: Final = frozenset(
    {
        keys.ENABLED_LABEL,
        keys.NODE_POOL_LABEL,
        keys.ACCELERATOR_TYPE_LABEL,
        f"{keys.GROUP}/sandbox",
        f"{keys.GROUP}/sandboxset",
    }
)
_ANNOTATIONS: Final = keys.OWN_POD_ANNOTATIONS | {keys.REGIONS_ANNOTATION, keys.DEAD_MAN_ANNOTATION}
_CEILING = keys.MAX_PRICE_ANNOTATION.rpartition("/")[2]
_NEAR = 0.8


def misspelt(metadata: Mapping[str, Any]) -> list[str]:
    """One line for each label or annotation of a Pod that would be ignored without a word."""
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    found = [_unknown("label", key, _LABELS) for key in _ours(labels) if key not in _LABELS]
    for key in _ours(annotations):
        if key not in _ANNOTATIONS:
            found.append(_unknown("annotation", key, {*_ANNOTATIONS, keys.MAX_PRICE_ANNOTATION}))
    for key in sorted(annotations):
        group, _, name = key.rpartition("/")
        if group == keys.AIBRIX_GROUP and name != _CEILING and _is_nearly_the_ceiling(name):
            found.append(_unknown("annotation", key, {keys.MAX_PRICE_ANNOTATION}))
    return found


def not_opted_in(metadata: Mapping[str, Any]) -> list[str]:
    """A warning where a Pod carries labels of ours and yet asks for nothing; none where it says so itself."""
    labels = metadata.get("labels") or {}
    said = labels.get(keys.ENABLED_LABEL)
    if said in (keys.ENABLED, "false"):
        return []
    nothing = "no machine is rented for this Pod"
    if said is not None:
        return [f"{nothing}: label {keys.ENABLED_LABEL} is {said!r}, not {keys.ENABLED!r}"]
    name = keys.ENABLED_LABEL.rpartition("/")[2]
    for key in sorted(labels):
        if key not in _LABELS and get_close_matches(key.rpartition("/")[2], [name], n=1, cutoff=_NEAR):
            return [f"{nothing}: did you mean the label {keys.ENABLED_LABEL} by {key}?"]
    if _ours(labels):
        return [f"{nothing}: it has labels of {keys.GROUP}, but not {keys.ENABLED_LABEL}: {keys.ENABLED!r}"]
    return []


def _ours(found: Iterable[str]) -> list[str]:
    return sorted(key for key in found if key.startswith(f"{keys.GROUP}/"))


def _unknown(what: str, key: str, known: Iterable[str]) -> str:
    names = {name.rpartition("/")[2]: name for name in known}
    near = get_close_matches(key.rpartition("/")[2], names, n=1)
    hint = f"; did you mean {names[near[0]]}?" if near else ""
    return f"{what} {key} is not known, and would be ignored{hint}"


def _is_nearly_the_ceiling(name: str) -> bool:
    plain = name.lower().replace("-", "").replace("_", "")
    return SequenceMatcher(a=plain, b=_CEILING.replace("-", "")).ratio() > _NEAR
