"""docs/field-cases.md against the tests: every case is there, and is tested where its row says, or later."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-cases.md"
CASES = [f"FC-{number:03}" for number in range(1, 131)]
OURS = [f"FX-{number:02}" for number in range(1, 12)]
# What concerns parts that exist: none of these may wait for a later one.
NOW = (
    *(range(1, 13)),
    *(range(19, 76)),
    *(range(77, 83)),
    94,
    *(range(96, 101)),
    *(range(102, 110)),
    121,
    122,
    *(range(125, 131)),
)
_ROW = re.compile(r"^\| (F[CX]-\d+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
_MARK = re.compile(r"\bfield_case\(([^)]*)\)")
_NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
_IN_NAME = re.compile(r"(?<![a-z])f([cx])_(\d{2,3})(?![0-9])")


def rows() -> dict[str, tuple[str, str, str]]:
    """Number to kind, what happened, and where it is tested."""
    found = _ROW.findall(PAGE.read_text("utf-8"))
    assert len(found) == len({number for number, *_ in found}), "a number has two rows"
    return {number: (kind, said, where) for number, kind, said, where in found}


def carried() -> dict[str, set[str]]:
    """Number to the files, below ``tests``, with a test that carries it."""
    files: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path == Path(__file__):
            continue
        text = path.read_text("utf-8")
        numbers = {number for mark in _MARK.findall(text) for number in re.findall(r"F[CX]-\d+", mark)}
        for name in _NAME.findall(text):
            numbers.update(f"F{kind.upper()}-{digits}" for kind, digits in _IN_NAME.findall(name))
        for number in numbers:
            files.setdefault(number, set()).add(path.relative_to(ROOT / "tests").as_posix())
    return files


def test_every_case_has_a_row_with_its_kind_and_what_happened():
    page = rows()

    assert list(page) == CASES + OURS
    assert [number for number, (kind, said, _) in page.items() if not kind.strip() or not said.strip()] == []


def test_each_row_names_exactly_the_files_whose_tests_carry_the_number():
    tests = carried()
    wrong = {}
    for number, (_, _, where) in rows().items():
        named = set(re.findall(r"`([^`]+\.py)`", where))
        if named != tests.get(number, set()):
            wrong[number] = (
                sorted(named - tests.get(number, set())),
                sorted(tests.get(number, set()) - named),
            )

    assert wrong == {}, "named without a test, and tested without being named"
    assert set(tests) <= {*CASES, *OURS}


def test_no_case_of_what_exists_is_open_and_every_other_says_what_will_test_it():
    for number, (_, _, where) in rows().items():
        if "`" not in where:
            assert where.startswith("later: "), number
            assert int(number[3:]) not in NOW or number.startswith("FX"), number
            assert not number.startswith("FX"), number


def test_each_of_our_own_finds_links_to_where_others_met_it():
    text = PAGE.read_text("utf-8")
    for number in OURS:
        (line,) = re.findall(rf"^- {number}: (.*)$", text, re.MULTILINE)
        assert re.search(r"\[[^\]]+\]\(https://github\.com/[^)]+\)", line), number
