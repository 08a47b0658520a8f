"""``python -m tests.model``: search for a schedule that breaks the protocol. Exit code 1 when one does.

``--without CLAUSE`` searches without a clause, ``--show SEED`` tells one schedule, and ``--witnesses
SECONDS`` finds, for each clause, the first seed that needs it.
"""

import sys
import time
from collections import Counter

import click

from tests.model.clauses import Clause
from tests.model.search import broken_by

CHUNK = 250  # schedules for one clause before the next has its turn
STALLING = frozenset({Clause.END_EXTRAS, Clause.EXTRA_KEEPS_STATE})  # no double, no extra


@click.command(help=__doc__)
@click.option("--seeds", default=10_000, show_default=True, help="How many schedules.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--without", multiple=True, help="Drop a clause, by its name in tests.model.clauses.")
@click.option("--stall", is_flag=True, help="Let senders stand still between fence and send.")
@click.option("--show", type=int, help="Run this one seed, and print what happens.")
@click.option("--all-found", is_flag=True, help="Do not stop at the first.")
@click.option("--witnesses", type=float, help="Search for so many seconds for what each clause is for.")
def main(
    seeds: int,
    first: int,
    without: tuple[str, ...],
    stall: bool,
    show: int | None,
    all_found: bool,
    witnesses: float | None,
) -> None:
    if witnesses is not None:
        _witnesses(witnesses, first=first)
        return
    dropped = [Clause[name] for name in without]
    if show is not None:
        found = broken_by(show, without=dropped, stall=stall, verbose=True)
        click.echo("\n".join([*found.log, found.message]) if found else "nothing breaks")
        sys.exit(found is not None)
    began, messages = time.monotonic(), Counter[str]()
    for seed in range(first, first + seeds):
        found = broken_by(seed, without=dropped, stall=stall)
        if found is not None:
            messages[found.message] += 1
            click.echo(f"seed {seed}: {found.message}")
            if not all_found:
                sys.exit(1)
    took_s = time.monotonic() - began
    click.echo(f"{seeds} schedules in {took_s:.0f} s, {sum(messages.values())} of them broken")
    sys.exit(bool(messages))


def _witnesses(for_s: float, *, first: int) -> None:
    """For each clause a seed that breaks without it; some need another clause dropped beside it."""
    began, next_seed = time.monotonic(), dict.fromkeys(Clause, first)
    while next_seed and time.monotonic() - began < for_s:
        for clause, seed in list(next_seed.items()):
            next_seed[clause] = seed + CHUNK
            if (witness := _witness(clause, range(seed, seed + CHUNK))) is not None:
                click.echo(witness)
                del next_seed[clause]
    for clause in next_seed:
        click.echo(f"{clause.name}: none in {next_seed[clause] - first} schedules")


def _witness(clause: Clause, seeds: range) -> str | None:
    stall = clause in STALLING
    how = ", stall=True" if stall else ""
    for seed in seeds:
        found = broken_by(seed, without=[clause], stall=stall)
        if found is not None and broken_by(seed, stall=stall) is None:
            return f"Clause.{clause.name}: Witness({seed}{how}),  # {found.message}"
    return None


if __name__ == "__main__":
    main()
