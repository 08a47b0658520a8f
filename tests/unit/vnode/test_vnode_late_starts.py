"""A machine that is late is given up only if it still boots when that is on record."""

from datetime import UTC, datetime
from typing import Any

import pytest
from vnode_makers import a_machine, a_pod, a_view, exited

from app.provisioning.keep import FalseStart
from app.settings import load
from app.vnode.course import Course
from app.vnode.starts import Look, Starts
from providers.base import EndReason, Machine, MachineState

NOBODY: Any = None  # asking it would fail


def looked_at(machine: Machine) -> tuple[Look, Course]:
    """A look at ``machine``, whose lateness has just been put on record."""
    starts = Starts(
        key=("fake", "default"),
        provisioning=NOBODY,
        settings=load({}, {}),
        care=NOBODY,
        block_ttl_s=NOBODY,
        now=lambda: datetime(2026, 1, 2, tzinfo=UTC),
        clock=lambda: 0.0,
    )
    course = Course(seen_at=0.0)
    course.care.booting_since = -60.0
    course.care.start = FalseStart(
        claim=NOBODY, host=None, message="late", late=True, blocks=True, block_ttl_s=60.0, failure=None
    )
    course.care.start_noted = True
    return starts.look(a_pod(), course, NOBODY, a_view(machine)), course


@pytest.mark.parametrize(
    "machine",
    [a_machine(MachineState.RUNNING), exited(EndReason.COMPLETED, 0)],
    ids=["running", "done"],
)
def test_a_machine_that_came_up_while_its_lateness_was_written_down_is_kept(machine: Machine) -> None:
    look, course = looked_at(machine)

    assert look == Look()
    assert course.care.cut is None
    assert (course.care.start, course.care.start_noted, course.care.booting_since) == (None, False, None)


def test_one_that_still_boots_then_is_given_up() -> None:
    look, course = looked_at(a_machine(MachineState.BOOTING))

    assert not look.held
    assert course.care.cut is not None
    assert course.care.cut.message == "late"
