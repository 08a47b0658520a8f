"""Pure: a Pod becomes what a cloud needs to run it, or the reasons why it cannot run there.

No I/O, no clock. What this version cannot honour is refused by name, never ignored: an ignored field would
run something else than was asked for.
"""

from app.workload.accelerators import BadRequest, accelerator_of
from app.workload.shapes import Unsupported, refusals, warnings
from app.workload.transform import build

__all__ = ["BadRequest", "Unsupported", "accelerator_of", "build", "refusals", "warnings"]
