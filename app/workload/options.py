"""What a Pod's author asks of single clouds: annotations ``cloud.aibrix.ai/<provider>-<option>``.

A claim freezes them and is itself bounded, so their number and length are, too.
"""

from collections.abc import Mapping
from typing import Final

from app.api.keys import AIBRIX_GROUP, MAX_PRICE_ANNOTATION
from app.workload.accelerators import BadRequest

OPTIONS_MAX: Final = 64
OPTION_CHARS_MAX: Final = 1024  # of a value in NodeClaim.spec.providerOptions
_PREFIX = f"{AIBRIX_GROUP}/"


def options_of(annotations: Mapping[str, str]) -> dict[str, str]:
    """The options by what follows the slash; `MAX_PRICE_ANNOTATION` is of no single cloud, so none of them.

    Raises:
        BadRequest: there are too many, or one is too long; every such one is named.
    """
    options = {
        key.removeprefix(_PREFIX): value
        for key, value in annotations.items()
        if key.startswith(_PREFIX) and key != MAX_PRICE_ANNOTATION
    }
    if len(options) > OPTIONS_MAX:
        raise BadRequest(f"{len(options)} annotations of {AIBRIX_GROUP}; at most {OPTIONS_MAX} are taken")
    long = [name for name, value in sorted(options.items()) if len(value) > OPTION_CHARS_MAX]
    if long:
        names = ", ".join(f"annotation {_PREFIX}{name}" for name in long)
        raise BadRequest(f"longer than {OPTION_CHARS_MAX} characters: {names}; shorten the value")
    return options
