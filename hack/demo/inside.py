"""A scene on Pods without a kubelet: logs, exec, cp, port-forward, attach; output after the end."""

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app import processes
from app.api import keys
from hack.demo.stage import NAMESPACE, Stage, Unmet

_SERVE = (
    'echo "serving in $HOSTNAME"; echo hello > index.html; '
    'exec python3 -m http.server "$PORT" --bind 127.0.0.1'
)
_TRAIN = "for step in 1 2 3; do echo step $step; sleep 0.3; done; echo done"


def logs(stage: Stage) -> None:
    """kubectl logs, exec, cp, port-forward and attach on rented machines; the log of a Job that is over."""
    modal = stage.clouds["modal"]
    if stage.cluster.webhook_url is not None:
        stage.say("This scene needs a cluster of its own: yours cannot reach an endpoint on this computer.")
        return
    stage.say("A Pod with one T4 on modal, whose simulated machines run a process. It has no kubelet.")
    stage.make(_pool(), _pod("server", _SERVE, ports=[8000]))
    stage.show("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod/server", "--timeout=60s")
    stage.until("it has said something", lambda: "serving in" in _kubectl(stage, "logs", "server"))
    stage.show("logs", "-n", NAMESPACE, "server", "--timestamps")

    stage.show("exec", "-n", NAMESPACE, "server", "--", "sh", "-c", "echo a command in $HOSTNAME")
    done = _run(stage, "exec", "server", "--", "sh", "-c", "exit 7")
    stage.check("exec ends with the code of its command, 7", done.returncode == 7)

    with tempfile.TemporaryDirectory() as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        there.write_bytes(os.urandom(1 << 20))
        home = _kubectl(stage, "exec", "server", "--", "sh", "-c", "echo $HOME").strip()
        _kubectl(stage, "cp", str(there), f"server:{home}/copy")
        _kubectl(stage, "cp", f"server:{home}/copy", str(back))
        stage.check(
            "a file that is copied there and back is the same", there.read_bytes() == back.read_bytes()
        )

    with _forwarded(stage, "server", 8000) as url:
        stage.until("the forwarded port answers with what the Pod serves", lambda: _get(url) == "hello\n")

    stage.say("A Pod that reads what somebody types.")
    stage.make(_pod("asks", "read name; echo hello $name", ports=[], stdin=True, stdinOnce=True))
    stage.show("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod/asks", "--timeout=60s")
    answer = _run(stage, "attach", "-i", "asks", typed="world\n").stdout
    stage.check("kubectl attach -i brings it there, and its answer back", answer == "hello world\n")

    stage.say("A Job that ends by itself. Its machine goes at once; what it said stays.")
    stage.make(_job("train", _TRAIN))
    stage.show("wait", "-n", NAMESPACE, "--for=condition=Complete", "job/train", "--timeout=60s")
    stage.until("its machine is gone", lambda: len(modal.alive()) == 1)
    stage.show("logs", "-n", NAMESPACE, "job/train")
    said = _kubectl(stage, "logs", "job/train")
    stage.check("all of it is there", said == "step 1\nstep 2\nstep 3\ndone\n")
    stage.show("delete", "job/train", "pod/server", "pod/asks", "-n", NAMESPACE, "--wait=false")
    stage.until("no Pod is left", lambda: not stage.objects("pods"), within_s=60)
    stage.until("modal holds no machine", lambda: not modal.alive(), within_s=60)


def _run(stage: Stage, *args: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [stage.cluster.kubectl, "-n", NAMESPACE, *args],
        env={**os.environ, "KUBECONFIG": str(stage.cluster.kubeconfig)},
        capture_output=True,
        text=True,
        input=typed,
        check=False,
        timeout=60,
    )


def _kubectl(stage: Stage, *args: str) -> str:
    done = _run(stage, *args)
    if done.returncode:
        raise Unmet(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _forwarded(stage: Stage, pod: str, port: int) -> Iterator[str]:
    (local,) = processes.free_ports(1)
    argv = [str(stage.cluster.kubectl), "-n", NAMESPACE, "port-forward", f"pod/{pod}", f"{local}:{port}"]
    print(f"$ kubectl {' '.join(argv[1:])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "KUBECONFIG": str(stage.cluster.kubeconfig)}
        child = processes.spawn(argv, log=Path(folder, "log"), env=env)
        try:
            yield f"http://127.0.0.1:{local}/index.html"
        finally:
            processes.stop(child, grace_s=5)


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        time.sleep(0.1)
        return ""


def _pool() -> dict[str, Any]:
    return {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_POOL,
        "metadata": {"name": "modal-only"},
        "spec": {"providers": [{"name": "modal"}], "capacityTypes": ["Spot", "OnDemand"]},
    }


def _spec(command: str, *, ports: list[int], restart: str, **more: Any) -> dict[str, Any]:
    container = {
        "name": "workload",
        "image": "nvidia/cuda:12.4.1-base-ubuntu22.04",
        "command": ["sh", "-c", command],
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"limits": {keys.GPU_RESOURCE: "1"}},
        **more,
    }
    return {"restartPolicy": restart, "terminationGracePeriodSeconds": 1, "containers": [container]}


def _labels() -> dict[str, str]:
    return {
        "app": "demo",
        keys.ENABLED_LABEL: keys.ENABLED,
        keys.NODE_POOL_LABEL: "modal-only",
        keys.ACCELERATOR_TYPE_LABEL: "T4",
    }


def _pod(name: str, command: str, *, ports: list[int], **container: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": _labels()}
    spec = _spec(command, ports=ports, restart="Never", **container)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _job(name: str, command: str) -> dict[str, Any]:
    template = {"metadata": {"labels": _labels()}, "spec": _spec(command, ports=[], restart="Never")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, "backoffLimit": 0},
    }
