"""One seed, one schedule: who runs next, what breaks, and when. Then the faults stop, and all comes to rest.

The chances of a schedule are drawn from its seed too, most of them zero: schedules in which everything goes
wrong at once find less than those in which a few things do, often.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.model.base import Steps
from tests.model.clauses import Clause
from tests.model.controller import Controller
from tests.model.world import LEASE, SETTLE, TIMEOUT, WINDOW, Broken, Claim, Faults, World

# What may happen, and in how many of the schedules it does.
EVENTS = {
    "away": 0.25,
    "restore": 0.35,
    "backup": 0.5,
    "pause": 0.5,
    "crash": 0.4,
    "delete": 0.4,
    "finish": 0.3,
    "force": 0.15,
    "vanish": 0.2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """What a schedule is mostly about. None: as drawn. Numbers are the most of each chance."""

    faults: dict[str, float] | None = None
    events: dict[str, float] | None = None
    tokens: float | None = None


FOCI = (
    Focus(),
    Focus(),
    Focus(faults={"late": 0.5}, events={"finish": 1.0, "delete": 0.3}),
    Focus(faults={"lost": 0.9, "late": 1.0, "refused": 0.6}, events={"pause": 0.5, "crash": 0.2}, tokens=1.0),
    Focus(
        faults={"lost": 0.9, "late": 0.8}, events={"restore": 1.0, "pause": 1.0, "finish": 0.3, "crash": 0.3}
    ),
    Focus(faults={"lost": 0.9, "late": 0.8}, events={"pause": 1.0, "delete": 0.2, "finish": 0.1}),
    Focus(faults={"lost": 0.9, "late": 1.0, "flap": 0.7}, events={"crash": 0.2, "vanish": 0.1}),
    Focus(
        faults={"late": 1.0, "flap": 0.7, "unknown": 0.5, "ignored": 0.4, "lost": 0.5}, events={"delete": 1.0}
    ),
)
STEPS = 400  # choices of the disturbed half of a schedule
REST = 12 * (LEASE + WINDOW + TIMEOUT + SETTLE)  # ticks within which everything must be at rest


@dataclass(slots=True)
class Process:
    """A controller's coroutines; paused, none of them moves."""

    controller: Controller
    threads: list["Thread"] = field(default_factory=list)
    paused: bool = False
    term: int = -1


@dataclass(slots=True, eq=False)
class Thread:
    steps: Steps[None]
    due: int = 0
    rank: float = 0.0


@dataclass(slots=True, kw_only=True)
class Found:
    """A broken promise; ``log`` is empty unless the schedule was run for it."""

    seed: int
    message: str
    log: list[str]


class Schedule:
    """A seed's world, run to its end."""

    def __init__(self, seed: int, *, without: Iterable[Clause] = (), stall: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        focus = self.rng.choice(FOCI)
        self.world = World(self.rng, self._faults(focus, stall=stall))
        self._habits(focus)
        dropped = frozenset(without)
        self.processes = [Process(Controller(name, self.world, without=dropped)) for name in ("A", "B")]
        for uid in range(1, 2 if self.rng.random() < 0.75 else 3):
            self.world.claims[uid] = Claim(uid)

    def _some(self, most: float, often: float = 0.5) -> float:
        return self.rng.random() * most if self.rng.random() < often else 0.0

    def _faults(self, focus: Focus, *, stall: bool) -> Faults:
        some = self._some
        drawn = {
            "lost": some(0.9, 0.6),
            "refused": some(0.5, 0.3),
            "late": some(1.0, 0.7),
            "flap": some(0.6),
            "unknown": some(0.4),
            "ignored": some(0.5, 0.2),
            "commit": some(0.15, 0.25),
        }
        tokens = self.rng.random() < (0.3 if focus.tokens is None else focus.tokens)
        if focus.faults is not None:
            drawn = {name: some(most, 0.8) for name, most in focus.faults.items()}
        return Faults(**drawn, tokens=tokens, stall=stall)

    def _habits(self, focus: Focus) -> None:
        """How often time passes, who runs next, and what happens around the protocol.

        ``turn`` None: anybody may run next. Else each coroutine has a rank, the first that can runs, and
        ``turn`` is the chance that its rank changes: so that one stands still in its middle while others go
        far.
        """
        rng = self.rng
        self.tick = 0.03 + rng.random() * 0.5
        self.turn = None if rng.random() < 0.4 else 0.02 + rng.random() * 0.3
        self.callers = 1 if rng.random() < 0.6 else 2  # of ensure, for one claim at one time
        self.often = rng.random() * 0.12
        kinds = {name: rng.random() for name, often in EVENTS.items() if rng.random() < often}
        if focus.events is not None:
            kinds = {name: rng.random() * most for name, most in focus.events.items()}
        if "restore" in kinds:
            kinds["backup"] = 0.5 + rng.random()
            self.world.backup()
        self.names, self.chances = [*kinds, "back", "go_on"], [*kinds.values(), 0.5, 0.5]

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises `Broken`."""
        for _ in range(STEPS):
            self._disturb()
            if self.rng.random() < self.tick or not self._step_any():
                self.world.tick()
        self._calm()
        self._until_rest(self._kept)
        self._delete_all()
        self._until_rest(self._nothing_left)

    def _disturb(self) -> None:
        world, rng = self.world, self.rng
        if rng.random() >= self.often:
            return
        (name,) = rng.choices(self.names, self.chances)
        process = self.processes[world.below(2)]
        claim = world.claims[1 + world.below(len(world.claims))]
        match name:
            case "away":
                world.store_away = True
            case "back":
                world.store_away = False
            case "restore" if world.backups:
                world.restore()
            case "backup":
                world.backup()
                return
            case "pause":
                process.paused = True
            case "go_on":
                process.paused = False
            case "crash":
                self._crash(process)
            case "delete" if not claim.gone:
                claim.deleting, claim.version = True, claim.version + 1
            case "finish":
                claim.finished = True
            case "force" if claim.deleting:
                claim.gone = True
            case "vanish" if alive := world.of(claim.uid):
                world.vanish(alive[0])
            case _:
                return
        world.note(f"-- {name} {process.controller.name} {claim.uid}")

    def _crash(self, process: Process) -> None:
        process.threads.clear()
        process.paused = False
        process.controller.forget()
        process.controller.lease_until = -1

    def _begin(self, process: Process) -> None:
        """The coroutines of a process; those of a term begin anew with each."""
        controller = process.controller
        if not process.threads:
            process.threads = [Thread(controller.lead(), rank=self.rng.random())]
            process.term = -1
        if process.term != controller.term and controller.leads():
            del process.threads[1:]
            process.term = controller.term
            duties = [controller.poll(), controller.keep()]
            for uid in self.world.claims:
                duties += [controller.rent(uid) for _ in range(self.callers)]
                duties += [controller.give_back(uid)]
            process.threads += [Thread(duty, rank=self.rng.random()) for duty in duties]

    def _step_any(self) -> bool:
        now = self.world.now
        ready: list[tuple[Process, Thread]] = []
        for process in self.processes:
            if not process.paused:
                self._begin(process)
                ready += [(process, thread) for thread in process.threads if thread.due <= now]
        if not ready:
            return False
        turn = self.turn
        if turn is None:
            _, thread = ready[self.world.below(len(ready))]
        else:
            _, thread = max(ready, key=lambda one: one[1].rank)
            if self.rng.random() < turn:
                thread.rank = self.rng.random()
        thread.due = next(thread.steps)
        return True

    # --- the end ----------------------------------------------------------------------------------

    def _calm(self) -> None:
        world = self.world
        tokens = world.faults.tokens
        world.note("-- the faults stop")
        world.faults = Faults(tokens=tokens)
        world.store_away = False
        for process in self.processes:
            process.paused = False

    def _until_rest(self, at_rest: Callable[[], str | None]) -> None:
        """Everybody moves in turn; once at rest, a while longer, so that it is no passing moment."""
        deadline, since = self.world.now + REST, None
        while True:
            for process in self.processes:
                self._begin(process)
                for thread in list(process.threads):
                    for _ in range(30):
                        if thread.due > self.world.now or thread not in process.threads:
                            break
                        thread.due = next(thread.steps)
            self.world.tick()
            wrong = at_rest()
            if wrong is not None:
                since = None
                if self.world.now > deadline:
                    raise Broken(wrong)
            elif since is None:
                since = self.world.now
            elif self.world.now > since + 4:
                return

    def _kept(self) -> str | None:
        """Every wanted claim has its machine, and no other has any."""
        world = self.world
        for claim in world.claims.values():
            machines = world.of(claim.uid)
            if claim.wanted:
                if claim.bound is None:
                    return f"claim {claim.uid} never comes to rest"
                if len(machines) > 1:
                    return f"claim {claim.uid} keeps {len(machines)} machines"
            elif machines:
                return f"claim {claim.uid}: machine {machines[0].id} leaks"
            elif claim.deleting and not claim.gone:
                return f"claim {claim.uid} is never released"
        return None

    def _delete_all(self) -> None:
        for claim in self.world.claims.values():
            if not claim.gone:
                claim.deleting, claim.version = True, claim.version + 1

    def _nothing_left(self) -> str | None:
        for claim in self.world.claims.values():
            if machines := self.world.of(claim.uid):
                return f"claim {claim.uid}: machine {machines[0].id} leaks"
            if not claim.gone:
                return f"claim {claim.uid} is never released"
        for uid, rental in self.world.rows.rentals.items():
            if rental.state not in ("none", "ended"):
                return f"the rental of claim {uid} stays {rental.state}"
            if any(not run.gone for run in rental.runs.values()):
                return f"a run of claim {uid} stays open: it would be billed for ever"
        return None if self.world.restored else self._unbilled()

    def _unbilled(self) -> str | None:
        """A machine that we ended has its run, unless its claim was torn out, or its row lost."""
        for machine in self.world.machines.values():
            rental = self.world.rows.rentals.get(machine.uid)
            known = rental is not None and machine.id in rental.runs
            if machine.asked and self.world.claims[machine.uid].released and not known:
                return f"machine {machine.id} of claim {machine.uid} was ended, and nobody has its run"
        return None


def broken_by(
    seed: int, *, without: Iterable[Clause] = (), stall: bool = False, verbose: bool = False
) -> Found | None:
    """What the schedule of this seed breaks; None: nothing."""
    schedule = Schedule(seed, without=without, stall=stall)
    schedule.world.verbose = verbose
    try:
        schedule.run()
    except Broken as broken:
        return Found(seed=seed, message=str(broken), log=schedule.world.log)
    return None
