"""The parts of the end-to-end test that can be wrong without a node."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api import keys
from app.api.nodepool import NodePool
from hack.cluster import binaries
from hack.e2e import containerfile, remains, rights, steps, story
from hack.e2e.__main__ import sweep_cgroups
from hack.e2e.packages import Programs
from hack.e2e.steps import breaking, leaving

ROOT = Path(__file__).resolve().parents[3]


def test_the_node_is_of_the_control_planes_release() -> None:
    pinned = [
        next(word for word in line.split() if word.startswith("v1."))
        for folder in ("kubernetes", "node")
        for line in (ROOT / "hack" / "gomod" / folder / "go.mod").read_text().splitlines()
        if line.startswith("require k8s.io/kubernetes") or line.strip().startswith("k8s.io/kubernetes v")
    ]

    assert set(pinned) == {binaries.kubernetes_version()}


def test_a_containerfile_becomes_files_and_a_configuration(tmp_path: Path) -> None:
    base, context = tmp_path / "base", tmp_path / "context"
    (base / "etc").mkdir(parents=True)
    (base / "etc" / "os").write_text("base")
    (context / "app" / "__pycache__").mkdir(parents=True)
    (context / "app" / "main.py").write_text("1")
    (context / "app" / "__pycache__" / "main.pyc").write_text("1")
    (context / "one").write_text("1")
    file = tmp_path / "Containerfile"
    file.write_text(
        "# comment\nARG BASE=some/image\nFROM ${BASE} AS build\nWORKDIR /src\nCOPY app app\nCOPY one ./\n"
        'FROM ${BASE}\nARG VERSION=0\nLABEL title="two words" \\\n  version="${VERSION}"\n'
        'COPY --from=build /src /opt/src\nENV A=1 B=2\nUSER 1:1\nENTRYPOINT ["main"]\n'
    )

    stage = containerfile.build(
        file, context=context, base=base, work=tmp_path / "work", arguments={"VERSION": "3"}
    )

    found = {str(path.relative_to(stage.root)) for path in stage.root.rglob("*") if path.is_file()}
    assert found == {"etc/os", "opt/src/app/main.py", "opt/src/one"}
    assert stage.labels == {"title": "two words", "version": "3"}
    assert (stage.environment, stage.user, stage.entrypoint) == ({"A": "1", "B": "2"}, "1:1", ["main"])


def test_an_instruction_that_is_not_known_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    file = tmp_path / "Containerfile"
    file.write_text("FROM x\nHEALTHCHECK CMD true\n")

    with pytest.raises(containerfile.ContainerfileError, match="HEALTHCHECK is not known"):
        containerfile.build(
            file, context=tmp_path, base=tmp_path / "base", work=tmp_path / "work", arguments={}
        )


def test_the_audit_log_says_which_rights_were_used_and_what_was_forbidden(tmp_path: Path) -> None:
    def event(user: str, verb: str, at: dict[str, str], code: int) -> str:
        body = {"user": {"username": user}, "verb": verb, "objectRef": at, "responseStatus": {"code": code}}
        return json.dumps(body | {"requestURI": "/x"})

    def role(resource: str, *verbs: str, **metadata: str) -> dict[str, Any]:
        rule = {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}
        return {"metadata": metadata, "rules": [rule]}

    log = tmp_path / "audit.log"
    log.write_text(
        "\n".join(
            (
                event("ours", "patch", {"resource": "pods", "subresource": "status", "namespace": "a"}, 200),
                event("ours", "get", {"resource": "secrets", "namespace": "home"}, 200),
                event("ours", "list", {"resource": "nodes"}, 403),
                event("other", "delete", {"resource": "pods"}, 200),
            )
        )
    )
    given = rights.granted(
        (
            role("pods/status", "get", "patch"),
            role("secrets", "get"),
            role("secrets", "get", namespace="home"),
        )
    )

    found = rights.used(log, account="ours", given=given)

    assert found.forbidden == ("list /x",)
    # The Secret at home was read by the right at home: the one for all namespaces was not needed for it.
    assert sorted(map(str, given - found.rights)) == [
        "get pods/status cluster-wide",
        "get secrets cluster-wide",
    ]


def test_the_storys_samples_are_what_a_user_may_apply() -> None:
    assert yaml.safe_load(story.POOL)["kind"] == "NodePool"
    assert all(step.__doc__ for step in steps.STEPS.values())
    assert yaml.safe_load(breaking.documented("name: dumps"))["kind"] == "Pod"
    assert {"pvc", "secret", "crd"} <= {
        argv[argv.index("delete") + 1] for argv in leaving.documented_remains()
    }


def test_a_run_removes_the_cgroups_of_dead_runs_and_of_no_other(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead, alive = tmp_path / f"nebula-e2e-{ended.pid}", tmp_path / f"nebula-e2e-{os.getpid()}"
    strangers = tmp_path / "nebula-e2e-x", tmp_path / "kubepods"
    for folder in (dead, alive, *strangers):
        (folder / "pods" / "pod1").mkdir(parents=True)

    sweep_cgroups(tmp_path)

    assert not dead.exists()
    assert alive.exists()
    assert all(folder.exists() for folder in strangers)


def test_what_a_run_leaves_behind_is_found(tmp_path: Path) -> None:
    state = tmp_path / "nebula-e2e-x"
    state.mkdir()
    (tmp_path / "cgroup").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()", str(state)], stdin=subprocess.PIPE) as process:
        network = os.readlink(f"/proc/{process.pid}/ns/net")
        found = remains.left(
            state, cgroups=[tmp_path / "cgroup", tmp_path / "gone"], namespaces=frozenset({network})
        )
        assert process.stdin is not None
        process.stdin.write(b"\n")
    state.rmdir()

    assert f"process {process.pid}" in found
    assert f"namespace {network} of process {process.pid}" in found
    assert [each for each in found if each.startswith(("cgroup", "folder"))] == [
        f"cgroup {tmp_path / 'cgroup'}",
        f"folder {state}",
    ]
    assert remains.left(state, cgroups=[], namespaces=frozenset({"net:[1]"})) == []


def test_of_links_and_tables_only_what_a_node_makes_counts() -> None:
    def machine(links: str, tables: str) -> remains.Machine:
        return remains.Machine(links=frozenset(links.split()), tables=frozenset(tables.split(", ")))

    before = machine("lo eth0 veth1", "table ip kube-proxy")
    after = machine(
        "lo eth0 veth1 veth2 node0 docker0", "table ip kube-proxy, table ip6 kube-proxy, table ip x"
    )

    assert before.new_on(after) == ["link node0", "link veth2", "nftables table ip6 kube-proxy"]
    assert before.new_on(before) == []


def test_a_tool_that_cannot_list_is_an_error_and_no_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run's own links and tables are not seen before it nor after, and nothing counts as left."""
    for name, code in (("ip", 0), ("nft", 1)):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\nexit {code}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = Programs(paths=(tmp_path,), libraries=(), plugins=tmp_path)

    with pytest.raises(subprocess.CalledProcessError, match="nft"):
        remains.Machine.now(packages=packages)


def test_what_install_md_has_applied_is_what_the_api_takes() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    objects = [yaml.safe_load(each) for each in re.findall(r"<<'END'\n(.*?)\nEND\n", text, flags=re.DOTALL)]

    assert [each["kind"] for each in objects] == ["NodePool", "NodePool", "Pod", "Pod"]
    for each in objects:
        if each["kind"] == "NodePool":
            assert NodePool.model_validate(each).spec.providers
    (pod,) = [each for each in objects if each["metadata"]["name"] == "one-gpu"]
    assert pod["metadata"]["labels"].keys() == {
        keys.ENABLED_LABEL,
        keys.NODE_POOL_LABEL,
        keys.ACCELERATOR_TYPE_LABEL,
    }
