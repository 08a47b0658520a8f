"""``python -m hack.shards``: the tests in shards, one folder each, and how long each took.

A shard is a process of its own: what one session leaves in memory or starts cannot help or hurt the next.
Three run at a time, since most of a shard is waiting; ``JOBS=1`` runs them one by one. What a shard prints
appears when it ends. All shards run even when one fails; the exit code is 1 if any did. What failed runs
once more, by itself: a test that passes then is named as FLAKY, loudly, and does not fail the run; one that
is wrong fails again (``RETRY=0`` gives it no second chance). Arguments after ``--`` go to pytest.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
FAST = ("cluster", "hack", "store", "providers", "unit", "model")
SLOW = ("chaos", *FAST, "chart")
SPLIT = frozenset({"cluster"})  # each of its folders is a shard
# The longest, in parts of every n-th file: one that is left alone at the end is what the run waits for.
PARTS = {"chaos": 4, "cluster/vnode": 2, "cluster/provisioning": 2, "cluster/whole": 2}
JOBS = 3

_TESTS_FAILED = 1  # pytest's exit code for tests that ran and failed
_NOTHING_COLLECTED = 5  # pytest's exit code for a selection without tests
_BEAT_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one shard went. ``verdict`` is ``ok``, ``FAILED`` or ``no tests``."""

    shard: str
    verdict: str
    took_s: float
    said: str


def shards(names: tuple[str, ...]) -> list[str]:
    """The folders below ``tests/`` that are there, or parts of them, the long ones first."""
    found: list[str] = []
    for name in names:
        folder = ROOT / "tests" / name
        if name in SPLIT and folder.is_dir():
            inner = sorted(path for path in folder.iterdir() if any(path.glob("test_*.py")))
            found += [f"{name}/{path.name}" for path in sorted(inner, key=_size, reverse=True)]
        elif folder.is_dir():
            found.append(name)
    parts = [
        f"{name} {n}/{count}" for name, count in PARTS.items() if name in found for n in range(1, count + 1)
    ]
    parts = [part for part in parts if _paths(part)]
    return parts + [name for name in found if name not in PARTS]


def slow_ones(names: list[str]) -> list[str]:
    """Those with a test marked slow somewhere in their folder: to collect the others only costs time."""
    return [name for name in names if any("mark.slow" in path.read_text() for path in _sources(name))]


def _sources(shard: str) -> list[Path]:
    return sorted((ROOT / "tests" / shard.partition(" ")[0]).rglob("*.py"))


def _paths(shard: str) -> list[str]:
    """What pytest is given for it, relative to the project."""
    name, _, part = shard.partition(" ")
    if not part:
        return [f"tests/{name}"]
    number, _, count = part.partition("/")
    files = sorted((ROOT / "tests" / name).glob("test_*.py"))[int(number) - 1 :: int(count)]
    return [f"tests/{name}/{path.name}" for path in files]


@click.command(help=__doc__)
@click.option("--slow", is_flag=True, help="Run the tests marked slow, and only those.")
@click.argument("pytest_args", nargs=-1)
def main(slow: bool, pytest_args: tuple[str, ...]) -> None:
    began_s = time.monotonic()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    wanted = slow_ones(shards(SLOW)) if slow else shards(FAST)
    for shard in wanted:
        waiting.put(shard)
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    marker = "slow" if slow else "not slow"

    def work() -> None:
        while not waiting.empty():
            try:
                shard = waiting.get_nowait()
            except queue.Empty:
                return
            done.put(_run(shard, marker=marker, args=pytest_args))

    jobs = max(1, int(os.environ.get("JOBS") or JOBS))
    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    outcomes: list[Outcome] = []
    while len(outcomes) < len(wanted):
        try:
            outcome = done.get(timeout=_BEAT_S)
        except queue.Empty:
            click.echo(f"… {len(outcomes)} of {len(wanted)} shards after {time.monotonic() - began_s:.0f} s")
            continue
        outcomes.append(outcome)
        click.echo(f"--- {outcome.shard}\n{outcome.said.rstrip()}")
        click.echo(f"--- {outcome.shard}: {outcome.verdict} in {outcome.took_s:.0f} s\n")
    width = max((len(outcome.shard) for outcome in outcomes), default=0)
    for outcome in outcomes:
        click.echo(f"{outcome.shard:<{width}}  {outcome.took_s:5.0f} s  {outcome.verdict}")
    click.echo(f"{'all':<{width}}  {time.monotonic() - began_s:5.0f} s")
    sys.exit(any(outcome.verdict == "FAILED" for outcome in outcomes))


def _run(shard: str, *, marker: str, args: tuple[str, ...]) -> Outcome:
    began_s = time.monotonic()
    remembered = (
        f"cache_dir=.pytest_cache/{marker.replace(' ', '-')}/{shard.replace(' ', '-').replace('/', '-')}"
    )
    argv = [sys.executable, "-m", "pytest", *_paths(shard), "-q", "-m", marker, "--durations=3"]
    argv += ["-o", remembered, *args]
    code, said = _pytest(argv)
    if code == _TESTS_FAILED and os.environ.get("RETRY") != "0":
        again, more = _pytest([*argv, "--last-failed", "--last-failed-no-failures=none"])
        said += f"\n=== what failed, once more, by itself\n{more}"
        if again == 0:
            failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            said += "".join(f"FLAKY, it passed by itself: {line}\n" for line in failed)
            return Outcome(shard, f"ok, {len(failed)} FLAKY", time.monotonic() - began_s, said)
    verdict = {0: "ok", _NOTHING_COLLECTED: "no tests"}.get(code, "FAILED")
    return Outcome(shard, verdict, time.monotonic() - began_s, said)


def _pytest(argv: list[str]) -> tuple[int, str]:
    ran = subprocess.run(
        argv,
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return ran.returncode, ran.stdout


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("test_*.py"))


if __name__ == "__main__":
    main()
