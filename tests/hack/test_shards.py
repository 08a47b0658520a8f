"""A failing shard gets one more try of what failed, and says so; what is wrong fails all the same."""

from pathlib import Path

import pytest

from hack import shards


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    monkeypatch.delenv("RETRY", raising=False)
    folder = tmp_path / "tests" / "some"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return folder


def test_a_test_that_passes_by_itself_is_named_and_does_not_fail_the_run(shard: Path):
    (shard / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def test_first_time():\n"
        "    seen = Path(__file__).with_name('seen')\n"
        "    first, _ = not seen.exists(), seen.touch()\n"
        "    assert not first\n"
        "def test_good():\n    pass\n"
    )

    outcome = shards._run("some", marker="not slow", args=())

    assert outcome.verdict == "ok, 1 FLAKY"
    assert "FLAKY, it passed by itself: FAILED tests/some/test_it.py::test_first_time" in outcome.said


@pytest.mark.parametrize("retry", [None, "0"])
def test_a_test_that_is_wrong_fails_the_run(shard: Path, monkeypatch: pytest.MonkeyPatch, retry: str | None):
    (shard / "test_it.py").write_text("def test_bad():\n    assert False\n")
    if retry is not None:
        monkeypatch.setenv("RETRY", retry)

    assert shards._run("some", marker="not slow", args=()).verdict == "FAILED"


def test_a_file_that_cannot_be_read_fails_the_run(shard: Path):
    (shard / "test_it.py").write_text("import nosuchmodule\n")

    assert shards._run("some", marker="not slow", args=()).verdict == "FAILED"


def test_the_parts_of_a_long_folder_have_each_of_its_files_once(shard: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "PARTS", {"some": 3})
    names = {f"tests/some/test_{letter}.py" for letter in "abcd"}
    for name in names:
        (shards.ROOT / name).touch()

    parts = shards.shards(("some",))

    assert parts == ["some 1/3", "some 2/3", "some 3/3"]
    given = [path for part in parts for path in shards._paths(part)]
    assert sorted(given) == sorted(names)


def test_no_part_is_without_a_file(shard: Path, monkeypatch: pytest.MonkeyPatch):
    """It would be given no path, and run all tests there are."""
    monkeypatch.setattr(shards, "PARTS", {"some": 2})
    (shard / "test_it.py").touch()

    assert shards.shards(("some",)) == ["some 1/2"]


def test_a_folder_without_a_slow_test_is_not_collected_for_them(shard: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "PARTS", {})
    (shard / "test_it.py").write_text("def test_good():\n    pass\n")
    other = shard.with_name("other")
    other.mkdir()
    (other / "rows.py").write_text("import pytest\nMARKS = [pytest.mark.slow]\n")

    assert shards.slow_ones(shards.shards(("some", "other"))) == ["other"]
