"""When a running workload's cloud is asked, and when it is not."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.settings import load
from app.vnode.care import Care, Loop, attend
from providers.base import End, EndReason

NOW = datetime(2026, 1, 2, tzinfo=UTC)
END = End(reason=EndReason.FAILED, exit_code=3, at=NOW)
NOBODY: Any = None  # asking it would fail


def a_loop(**changes: Any) -> Loop:
    return Loop(**({"run": NOW, "end": END, "wait_s": 10.0, "due_at": 100.0, "told": True} | changes))


@pytest.mark.parametrize(
    "care",
    [
        Care(),
        Care(loop=a_loop(due_at=100.1)),
        Care(loop=a_loop(told=False)),
        Care(loop=a_loop(), unable=True),
        Care(stop_by=NOW - timedelta(seconds=1)),
        Care(stop_by=NOW + timedelta(seconds=9), stop_told=True),
        Care(stop_by=NOW + timedelta(seconds=9), stop_useless=True),
    ],
    ids=["nothing", "wait-not-over", "not-told-yet", "unable", "grace-over", "stop-told", "stop-useless"],
)
async def test_nobody_is_asked_before_it_is_time_or_in_vain(care: Care) -> None:
    settings = load({"profile": "fast"}, {})

    again = await attend(care, NOBODY, keeper=NOBODY, settings=settings, now=lambda: NOW, clock=lambda: 100.0)

    assert again is None
