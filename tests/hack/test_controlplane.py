"""Our control plane comes up whole, goes without a trace, and needs no luck with its end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.processes import tail
from hack.cluster import ClusterFailed, ControlPlane, NotUsable, StateInUse, binaries, obtain
from tests.hack.processes import ROOT, alive, descendants, listens, owner, until
from tests.support.cluster import Kubectl

PARTS = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}


@pytest.fixture(scope="module")
def plane():
    """One of our own: its parts are stopped by these tests."""
    with ControlPlane() as started:
        yield started


def kubectl_of(plane: ControlPlane, *args: str) -> str:
    done = subprocess.run(
        [plane.kubectl, f"--kubeconfig={plane.kubeconfig}", *args], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_started_control_plane_is_ready_for_pods(plane: ControlPlane):
    version = json.loads(kubectl_of(plane, "get", "--raw", "/version"))
    kubectl_of(plane, "run", "one", "--image=none", "--restart=Never")

    assert set(plane.pids) == PARTS
    assert version["gitVersion"] == binaries.kubernetes_version()
    assert kubectl_of(plane, "get", "pod", "one", "-o", "name") == "pod/one\n"


def test_the_kubeconfig_holds_its_certificates_and_is_ours_alone(plane: ControlPlane):
    text = plane.kubeconfig.read_text()

    assert plane.kubeconfig.stat().st_mode & 0o777 == 0o600
    assert "client-key-data" in text
    assert str(plane.kubeconfig.parent) not in text


def test_the_audit_log_counts_requests_by_user_agent(plane: ControlPlane):
    kubectl_of(plane, "get", "namespaces")

    lines = [json.loads(line) for line in plane.audit_log.read_text().splitlines()]
    mine = [line for line in lines if line.get("userAgent", "").startswith("kubectl/")]
    assert any(line["requestURI"].startswith("/api/v1/namespaces") for line in mine)


def test_objects_survive_a_restart_of_the_api_server_at_the_same_address(plane: ControlPlane):
    server = plane.server
    kubectl_of(plane, "create", "namespace", "kept")

    plane.restart_apiserver()

    assert plane.server == server
    assert kubectl_of(plane, "get", "namespace", "kept", "-o", "name") == "namespace/kept\n"


def test_a_state_folder_keeps_objects_and_has_one_owner(tmp_path: Path):
    with ControlPlane(state=tmp_path) as first:
        family, port = list(first.pids.values()), first.port
        kubectl_of(first, "create", "namespace", "kept")
        with pytest.raises(StateInUse, match=str(os.getpid())):
            ControlPlane(state=tmp_path).start()
        assert set(first.pids) == PARTS

    assert not alive(family)
    assert not listens(port)
    with ControlPlane(state=tmp_path) as second:
        assert kubectl_of(second, "get", "namespace", "kept", "-o", "name") == "namespace/kept\n"


def test_a_failed_start_says_why_and_leaves_nothing():
    plane = ControlPlane(apiserver_flags=["--no-such-flag"])
    before = set(descendants(os.getpid()))

    with pytest.raises(ClusterFailed, match=r"kube-apiserver ended [\s\S]*no-such-flag"):
        plane.start()

    assert plane.pids == {}
    assert set(descendants(os.getpid())) <= before


def test_no_part_outlives_an_owner_that_was_killed():
    code = (
        "import json, time; from hack.cluster import ControlPlane\n"
        "plane = ControlPlane(); plane.start()\n"
        "print(json.dumps(plane.pids), flush=True); time.sleep(600)\n"
    )
    with owner(code) as (process, said):
        family = [int(str(pid)) for pid in said.values()]
        assert sorted(alive(family)) == sorted(family)
        assert len(family) == len(PARTS)

        process.kill()

        until(lambda: not alive(family))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_the_command_ends_all_parts_in_order_when_it_is_asked_to(tmp_path: Path, ending: signal.Signals):
    command = [sys.executable, "-m", "hack.cluster", "run", "--state", str(tmp_path / "state")]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        until(lambda: "export KUBECONFIG=" in tail(log), timeout_s=120)
        family = descendants(process.pid)
        assert len(family) == len(PARTS)

        process.send_signal(ending)

        assert process.wait(timeout=60) == 130
        assert not alive(family)
    finally:
        process.kill()
        process.wait()


def test_up_runs_on_behind_us_until_down(tmp_path: Path):
    def command(verb: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hack.cluster", verb, "--state", str(tmp_path / "state")]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)

    started = command("up")
    pid = int((tmp_path / "state" / "lock").read_text())
    family = [pid, *descendants(pid)]
    again = command("up")
    ended = command("down")

    assert started.stdout == f"export KUBECONFIG={tmp_path / 'state' / 'admin.kubeconfig'}\n"
    assert again.returncode == 1
    assert f"process {pid} runs it already" in again.stderr
    assert ended.returncode == 0
    until(lambda: not alive(family))  # the runner gives its lock back with its last breath
    assert command("down").returncode == 0, "none running is a success"


def test_somebody_elses_cluster_is_used_and_left_alone(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEBULA_TEST_KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setenv("NEBULA_WEBHOOK_URL", "https://127.0.0.1:9443")

    with obtain() as cluster:
        assert not cluster.ours
        assert cluster.webhook_url == "https://127.0.0.1:9443"
        assert "default" in Kubectl(cluster)("get", "namespaces", "-o", "name")

    assert set(plane.pids) == PARTS


@pytest.mark.parametrize("url", ["", "http://example.test"], ids=["missing", "no-tls"])
def test_somebody_elses_cluster_needs_the_webhooks_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
):
    (tmp_path / "config").write_text("{}")
    monkeypatch.setenv("NEBULA_TEST_KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("NEBULA_WEBHOOK_URL", url)

    with pytest.raises(NotUsable, match="NEBULA_WEBHOOK_URL"):
        obtain()
