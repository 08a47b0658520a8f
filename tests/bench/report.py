"""The figures of a run as a table beside what is wanted, and as files.

``artifacts/bench.json`` has the same keys for ever, so that runs can be compared by a program;
``artifacts/bench-details.json`` has everything.
"""

import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.bench.observe import Request

ARTIFACT = Path(__file__).resolve().parents[2] / "artifacts" / "bench.json"
DETAILS = ARTIFACT.with_name("bench-details.json")
KEYS = (
    "n",
    "ready_last_s",
    "drained_s",
    "floor_ready_s",
    "floor_drained_s",
    "floor_cpu_ms",
    "writes_per_pod",
    "cpu_ms_per_pod",
    "peak_mib",
    "idle_core_share",
    "idle_requests_per_s",
    "restart_s",
)
# An existing Go controller of this kind under the same load: 500 Pods, two cores, its webhook off.
RIVAL = {
    "ready_last_s": 30.0,
    "drained_s": 40.0,
    "writes_per_pod": 19.0,
    "cpu_ms_per_pod": 100.0,
    "peak_mib": 158.0,
    "idle_core_share": 0.09,
    "idle_requests_per_s": 34.0,
}
PEAK_MIB = {0: 110.0, 500: 150.0, 2000: 220.0, 5000: 350.0}


def budget(figures: dict[str, Any]) -> dict[str, float]:
    """What each figure of this run may be at most."""
    most: dict[str, float] = {"writes_per_pod": 11.0, "statements_per_pod": 12.0, "idle_core_share": 0.03}
    most |= {"restart_s": 10.0, "restart_killed_s": 25.0, "restart_writes": 0.0, "restart_killed_writes": 0.0}
    most |= {"dry_run_p99_ms": 10.0, "dry_run_cpu_ms": 1.0, "start_s": 3.0, "help_s": 0.3}
    if figures.get("floor_ready_s"):
        most["ready_last_s"] = 1.5 * figures["floor_ready_s"]
        most["drained_s"] = 1.5 * figures["floor_drained_s"]
        most["cpu_ms_per_pod"] = figures["floor_cpu_ms"] + 25.0
    most["peak_mib"] = min((mib for pods, mib in PEAK_MIB.items() if figures["n"] <= pods), default=350.0)
    most["base_mib"] = PEAK_MIB[0]
    return most


def show(figures: dict[str, Any]) -> None:
    """Print every number, what it may be, and the rival's."""
    most = budget(figures)
    machine = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    print(f"\n{figures['n']} Pods; {machine}, Python {platform.python_version()}")
    print(f"{'':22}{'measured':>12}{'at most':>12}{'Go, 500 Pods':>14}")
    for name, value in figures.items():
        if not isinstance(value, int | float) or name == "n":
            continue
        wanted = f"{most[name]:12.2f}" if name in most else " " * 12
        rival = f"{RIVAL[name]:14.2f}" if name in RIVAL else " " * 14
        over = "   over" if name in most and value > most[name] else ""
        print(f"{name:22}{value:12.3f}{wanted}{rival}{over}")


def show_stages(title: str, table: dict[str, dict[str, float]]) -> None:
    for stage, times in table.items():
        shown = "  ".join(f"{name} {value:7.2f}" for name, value in times.items())
        print(f"  {title:8}{stage:16}{shown} s")


def show_requests(requests: Counter[Request], pods: int) -> None:
    for (verb, resource, sub), count in requests.most_common(25):
        print(f"  {count / pods:8.2f} a Pod  {verb} {resource}{f'/{sub}' if sub else ''}")


def write(figures: dict[str, Any]) -> None:
    """Write both files; a key of the first that this run has not measured is null."""
    ARTIFACT.parent.mkdir(exist_ok=True)
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }
    ARTIFACT.write_text(json.dumps({name: rounded.get(name) for name in KEYS}, indent=2) + "\n")
    DETAILS.write_text(json.dumps(rounded, indent=2) + "\n")
    print(f"\nwritten: {ARTIFACT} and {DETAILS.name}")
