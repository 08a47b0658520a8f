"""``python -m hack.shards``: the tests in shards, one folder each, and how long each took.

A shard is a process of its own: what one session leaves in memory or starts cannot help or hurt the next. All
shards run even when one fails; the exit code is 1 if any did. Arguments after ``--`` go to pytest.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
FAST = ("unit", "store", "hack", "cluster", "providers")
SLOW = (*FAST, "chaos", "chart")

_NOTHING_COLLECTED = 5  # pytest's exit code for a selection without tests


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one shard went. ``verdict`` is ``ok``, ``FAILED`` or ``no tests``."""

    shard: str
    verdict: str
    took_s: float


@click.command(help=__doc__)
@click.option("--slow", is_flag=True, help="Run the tests marked slow, and only those.")
@click.argument("pytest_args", nargs=-1)
def main(slow: bool, pytest_args: tuple[str, ...]) -> None:
    shards = [shard for shard in (SLOW if slow else FAST) if (ROOT / "tests" / shard).is_dir()]
    outcomes = []
    for shard in shards:
        click.echo(f"--- {shard}")
        outcome = _run(shard, marker="slow" if slow else "not slow", args=pytest_args)
        click.echo(f"--- {shard}: {outcome.verdict} in {outcome.took_s:.0f} s\n")
        outcomes.append(outcome)
    width = max((len(outcome.shard) for outcome in outcomes), default=0)
    for outcome in outcomes:
        click.echo(f"{outcome.shard:<{width}}  {outcome.took_s:5.0f} s  {outcome.verdict}")
    click.echo(f"{'all':<{width}}  {sum(outcome.took_s for outcome in outcomes):5.0f} s")
    sys.exit(any(outcome.verdict == "FAILED" for outcome in outcomes))


def _run(shard: str, *, marker: str, args: tuple[str, ...]) -> Outcome:
    began_s = time.monotonic()
    argv = [sys.executable, "-m", "pytest", f"tests/{shard}", "-q", "-m", marker, "--durations=5", *args]
    code = subprocess.run(argv, cwd=ROOT, check=False).returncode
    verdict = {0: "ok", _NOTHING_COLLECTED: "no tests"}.get(code, "FAILED")
    return Outcome(shard, verdict, time.monotonic() - began_s)


if __name__ == "__main__":
    main()
