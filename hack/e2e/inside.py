"""What runs as the first process of the namespaces: it takes care of orphans, and its end is everybody's end.

``python -m hack.e2e.inside PLAN`` is started by ``hack.e2e`` under ``unshare``; nothing else calls it. The
folders of this machine that containerd, CNI and the kubelet write to by fixed names are covered first.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from app.processes import tail
from hack.cluster import ClusterFailed, ControlPlane
from hack.e2e import node as nodes
from hack.e2e import story
from hack.e2e.images import PREVIOUS_TAG, Archive
from hack.e2e.packages import Programs
from hack.e2e.steps import STEPS

NAMESPACES = "namespaces.json"  # in the state folder: which ones these are, to look for them afterwards
_COVERED = ("/var", "/opt")  # by overlays whose upper folder goes with the state


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the outside has prepared. Written as JSON into the state folder."""

    state: Path
    kubernetes: Path
    node: Path
    helm: Path
    helm_major: int
    packages: Programs
    nebula: Archive
    previous: Archive
    previous_chart: Path
    postgres: Archive
    pause: Archive
    cgroup: str
    until: str | None
    skip: tuple[str, ...]

    def write(self) -> Path:
        file = self.state / "plan.json"
        file.write_text(json.dumps(asdict(self), default=str))
        return file


def read(file: Path) -> Plan:
    raw = json.loads(file.read_text())

    def image(name: str) -> Archive:
        return Archive(raw[name]["name"], Path(raw[name]["file"]), raw[name]["size_bytes"])

    packages = raw["packages"]
    return Plan(
        state=Path(raw["state"]),
        kubernetes=Path(raw["kubernetes"]),
        node=Path(raw["node"]),
        helm=Path(raw["helm"]),
        helm_major=raw["helm_major"],
        packages=Programs(
            paths=tuple(map(Path, packages["paths"])),
            libraries=tuple(map(Path, packages["libraries"])),
            plugins=Path(packages["plugins"]),
        ),
        nebula=image("nebula"),
        previous=image("previous"),
        previous_chart=Path(raw["previous_chart"]),
        postgres=image("postgres"),
        pause=image("pause"),
        cgroup=raw["cgroup"],
        until=raw["until"],
        skip=tuple(raw["skip"]),
    )


def main(plan: Plan) -> int:
    """Run the story in a child and reap everybody else's children until it ends. Returns its exit code."""
    own = {each: os.readlink(f"/proc/self/ns/{each}") for each in ("net", "mnt", "pid", "ipc", "uts")}
    (plan.state / NAMESPACES).write_text(json.dumps(own))
    child = os.fork()
    if child == 0:
        os._exit(_run(plan))

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGINT)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _run(plan: Plan) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _cover(plan.state)
        _story(plan)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except (story.Failed, nodes.NodeFailed, ClusterFailed) as error:
        print(f"FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _story(plan: Plan) -> None:
    nodes.Node.network()
    flags = (
        "--bind-address=0.0.0.0",
        f"--advertise-address={nodes.ADDRESS}",
        "--endpoint-reconciler-type=lease",
    )
    began_s = time.monotonic()
    plane = ControlPlane(state=plan.state / "control-plane", programs=plan.kubernetes, apiserver_flags=flags)
    with plane:
        node = nodes.Node(
            plane=plane,
            home=plan.state / "node",
            programs=plan.node,
            packages=plan.packages,
            cgroup=plan.cgroup,
        )
        try:
            node.start((plan.pause, plan.postgres, plan.nebula, plan.previous))
            print(f"  node Ready, images there, after {time.monotonic() - began_s:.0f} s", flush=True)
            told = story.Story(
                plane=plane,
                node=node,
                helm_program=plan.helm / f"helm{plan.helm_major}",
                other_helm=plan.helm / f"helm{7 - plan.helm_major}",  # 3 and 4
                previous_chart=plan.previous_chart,
                previous_tag=PREVIOUS_TAG,
                image=plan.nebula.name,
                home=plan.state,
            )
            try:
                told.tell(STEPS, until=plan.until, skip=plan.skip)
            except BaseException:
                told.describe()
                raise
            finally:
                told.tell_figures()
        except nodes.NodeFailed:
            print(tail(node.log("kubelet")), file=sys.stderr)
            raise
        finally:
            node.stop()


def _cover(state: Path) -> None:
    """Everything written below these from here on lands in the state folder, or in memory."""
    subprocess.run(["mount", "--make-rshared", "/"], check=True)  # a peer group of this namespace alone
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    for path in _COVERED:
        upper, work = (state / "covered" / path.strip("/") / part for part in ("upper", "work"))
        for folder in (upper, work):
            folder.mkdir(parents=True)
        options = f"lowerdir={path},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, path], check=True)
    subprocess.run(["hostname", "local"], check=False)


if __name__ == "__main__":
    sys.exit(main(read(Path(sys.argv[1]))))
