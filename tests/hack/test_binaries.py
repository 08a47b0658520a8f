"""The cache of the cluster's programs: its key, its place, and where Go comes from."""

import os
import shutil
from pathlib import Path

import pytest

from hack.cluster import binaries, golang


@pytest.fixture
def gomod(tmp_path: Path) -> Path:
    return Path(shutil.copytree(binaries.GOMOD, tmp_path / "gomod"))


def a_go(folder: Path, *, version: str) -> Path:
    """A program that answers like Go, and tells if it may switch to another version."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "go"
    program.write_text(
        f'#!/bin/sh\n[ "$GOTOOLCHAIN" = local ] && echo "go version go{version} linux/amd64"\n'
    )
    program.chmod(0o755)
    return program


def test_the_same_module_lists_give_the_same_set(gomod: Path):
    assert binaries.key(gomod=gomod) == binaries.key()


@pytest.mark.parametrize("name", ["etcd/go.sum", "kubernetes/go.sum", "kubernetes/go.mod"])
def test_another_module_list_gives_another_set(gomod: Path, name: str):
    (gomod / name).write_text((gomod / name).read_text() + "\n// changed\n")

    assert binaries.key(gomod=gomod) != binaries.key()


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NEBULA_K8S_BIN", raising=False)
    monkeypatch.delenv("NEBULA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert binaries.folder() == tmp_path / "xdg" / "nebula" / "kubernetes" / binaries.key() / "bin"

    monkeypatch.setenv("NEBULA_CACHE", str(tmp_path / "named"))
    assert binaries.folder() == tmp_path / "named" / "kubernetes" / binaries.key() / "bin"

    monkeypatch.setenv("NEBULA_K8S_BIN", str(tmp_path / "ready"))
    assert binaries.folder() == tmp_path / "ready"


def test_a_folder_of_ready_programs_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for program in binaries.PROGRAMS[:-1]:
        (tmp_path / program.name).touch()
    monkeypatch.setenv("NEBULA_K8S_BIN", str(tmp_path))

    with pytest.raises(binaries.BuildFailed, match="kubectl is missing"):
        binaries.build()

    (tmp_path / "kubectl").touch()
    assert binaries.build() == tmp_path


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("1.25.9", False),
        ("1.26.0", True),
        ("1.26.8", True),
        ("1.30.1", True),
        ("1.26", True),
        ("2.0.0", True),
    ],
)
def test_a_go_on_path_is_taken_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, good: bool
):
    program = a_go(tmp_path, version=version)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = golang.on_path((1, 26, 0))

    assert (found.program if found else None) == (program if good else None)


def test_something_else_called_go_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a_go(tmp_path, version="1.26.0").write_text("#!/bin/sh\necho a board game\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert golang.on_path((1, 26, 0)) is None


def test_the_module_lists_say_which_go_they_need():
    assert golang.minimum(binaries.GOMOD / "kubernetes" / "go.mod") >= (1, 26, 0)


def test_a_packaged_go_that_is_in_the_cache_is_used_again(tmp_path: Path):
    program = a_go(tmp_path / f"go-{golang.PACKAGE_VERSION}" / "go" / "bin", version=golang.PACKAGE_VERSION)

    assert golang.from_package((1, 26, 0), cache=tmp_path).program == program


def test_without_any_go_the_message_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # an index that has nothing
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(golang.NoGo, match=r"Go 1\.26\.0 or newer[\s\S]*https://go\.dev/dl/"):
        golang.from_package((1, 26, 0), cache=tmp_path)

    assert list(tmp_path.glob("go-*")) == []


def test_helm_is_a_set_of_its_own_and_changes_nothing_about_the_cluster(gomod: Path):
    before = binaries.key(gomod=gomod)
    (gomod / "helm4" / "go.sum").write_text("")

    assert binaries.key(gomod=gomod) == before
    assert binaries.key(gomod=gomod, wanted=binaries.HELM) != binaries.key(wanted=binaries.HELM)
