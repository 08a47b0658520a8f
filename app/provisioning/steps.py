"""Named steps of renting and releasing, so that a test can kill the process exactly there.

``NEBULA_DIE_AT=intent.after`` ends the process with SIGKILL when that step is reached; with
``intent.after=SIGSTOP`` the process stands still there instead, once, as one that lost its processor. Without
the variable a step costs one comparison. `NAMES` is what the crash tests go through.
"""

import os
import signal

NAMES = (
    "intent.before",
    "intent.after",
    "mark.before",
    "mark.after",
    "fence.before",
    "fence.after",
    "send.after",
    "record.after",
    "ending.before",
    "ending.after",
    "terminate.before",
    "terminate.after",
    "ended.before",
    "ended.after",
    "finalizer.before",
    "finalizer.after",
)

_die_at, _, _signal = os.environ.get("NEBULA_DIE_AT", "").partition("=")


def reach(step: str) -> None:
    """Note that ``step`` is reached."""
    global _die_at
    if step == _die_at:
        _die_at = ""
        os.kill(os.getpid(), signal.Signals[_signal or "SIGKILL"])
