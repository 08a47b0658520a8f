"""Every numbered behaviour that is promised is on a test (``behaviour(N)``) or is a row of deviations."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISED = (
    (1, 15),  # admission
    (16, 28),  # accelerators
    (29, 66),  # the placement walk
    (67, 84),  # blocks
    (85, 95),  # claims and stale ones
    (96, 101),  # ungating
    (102, 110),  # reaping
    (111, 120),  # virtual nodes
    (121, 148),  # create
    (149, 155),  # crash points
    (156, 159),  # update
    (160, 169),  # delete
    (170, 179),  # restart
    (180, 204),  # projection of statuses
    (205, 223),  # classes of errors
    (224, 239),  # environment
    (241, 241),
    (279, 303),  # claims and their finalizer
    (304, 309),  # NodePool status
    (340, 348),  # certificates of the webhooks
    (349, 354),  # metrics of placement
    (357, 375),  # catalogue, regions, egress, packaging
    (389, 398),  # one writer of a Pod's status
    (399, 404),  # the store
    (405, 414),  # trust boundaries
    (415, 419),  # completion
)
_MARK = re.compile(r"\bbehaviour\(([^)]*)\)")
_ROW = re.compile(r"^\| ([0-9][0-9 ,–]*) \|", re.MULTILINE)


def carried() -> set[int]:
    """The numbers on tests."""
    found: set[int] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__):
            for mark in _MARK.findall(path.read_text("utf-8")):
                found.update(int(number) for number in re.findall(r"\d+", mark))
    return found


def deviations() -> set[int]:
    """The numbers in the first column of the page."""
    found: set[int] = set()
    for cell in _ROW.findall((ROOT / "docs" / "deviations.md").read_text("utf-8")):
        for part in cell.split(","):
            first, _, last = part.strip().partition("–")
            found.update(range(int(first), int(last or first) + 1))
    return found


def test_every_promised_behaviour_is_on_a_test_or_a_row_of_deviations():
    promised = {number for first, last in PROMISED for number in range(first, last + 1)}

    assert sorted(promised - carried() - deviations()) == []
