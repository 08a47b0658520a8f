"""What Pods use, read from their cgroups of version 1 or 2. Durations are seconds, memory bytes."""

import time
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def idle(pods: Sequence[str], *, cgroup: str, over_s: float) -> list[tuple[int, float]]:
    """Return working set and share of a core of each Pod, by UID, over a time in which nothing happens."""
    before = [_cpu_s(pod, cgroup) for pod in pods]
    began_s = time.monotonic()
    time.sleep(over_s)
    took_s = time.monotonic() - began_s
    after = [_cpu_s(pod, cgroup) for pod in pods]
    return [
        (_working_set_bytes(pod, cgroup), (last - first) / took_s)
        for pod, first, last in zip(pods, before, after, strict=True)
    ]


def _folder(controller: str, pod: str, cgroup: str) -> Path:
    for root in (_ROOT / controller / cgroup, _ROOT / cgroup):
        for folder in root.rglob(f"pod{pod}"):
            return folder
    raise FileNotFoundError(f"no cgroup of Pod {pod}")


def _cpu_s(pod: str, cgroup: str) -> float:
    folder = _folder("cpuacct", pod, cgroup)
    if (usage := folder / "cpuacct.usage").exists():
        return int(usage.read_text()) / 1e9
    return _stat(folder / "cpu.stat")["usage_usec"] / 1e6


def _working_set_bytes(pod: str, cgroup: str) -> int:
    folder = _folder("memory", pod, cgroup)
    if (usage := folder / "memory.usage_in_bytes").exists():
        return int(usage.read_text()) - _stat(folder / "memory.stat")["total_inactive_file"]
    return int((folder / "memory.current").read_text()) - _stat(folder / "memory.stat")["inactive_file"]


def _stat(file: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in file.read_text().splitlines())}
