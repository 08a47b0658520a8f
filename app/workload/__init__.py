"""Pure: a Pod becomes what a cloud needs to run it, or the reasons why it cannot run there.

No I/O, no clock. What this version cannot honour is refused by name, never ignored: an ignored field would
run something else than was asked for.
"""

from app.workload.accelerators import BadRequest, accelerator_of
from app.workload.amounts import Amounts, amounts_of
from app.workload.options import options_of
from app.workload.prices import max_price_of
from app.workload.shapes import Unsupported, refusals, warnings
from app.workload.transform import build

__all__ = [
    "Amounts",
    "BadRequest",
    "Unsupported",
    "accelerator_of",
    "amounts_of",
    "build",
    "max_price_of",
    "options_of",
    "refusals",
    "warnings",
]
