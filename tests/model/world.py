"""What the protocol stands on: a clock, a cloud, a store and a cluster, all of them allowed to misbehave.

Time is whole ticks. Whatever is a ghost here (`Claim.bound`, `Claim.released`, `Machine`) is known to the
world and to the checks alone. A check that fails raises `Broken`: that is what a search looks for.

What is taken for granted: a machine that was shown once is known to every get from then on; a complete list
leaves out a machine that is old enough at most once running; no connection to the store outlives a restore.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

LEASE = 12  # how long a leader leads without renewing
WINDOW = 6  # from intent to send_by
TIMEOUT = 4  # the client's, for a create: its effect, too, comes within it
SETTLE = 8  # how long a machine may stay out of lists and gets after the last possible effect
REPLAY_FOR = 60  # how long a token means the same machine
END_LAG = 4  # from an accepted terminate until the machine is gone, at most


class Broken(Exception):
    """The protocol broke a promise."""


class Away(Exception):
    """The store did not answer; what was asked may have been done."""


class Unknown(Exception):
    """The cloud gave no usable answer; what was asked may have been done."""


class Refused(Exception):
    """A compare-and-set found something else."""


@dataclass(slots=True)
class Machine:
    """One real machine. ``lists_at`` and ``gets_at``: from then on it is shown for certain."""

    id: int
    uid: int
    attempt: int
    sequence: int
    token: str
    made_at: int
    lists_at: int
    gets_at: int
    gone_at: int | None = None
    asked: bool = False  # ghost: we have asked for its end, and the cloud has taken it
    hidden_from: set[str] = field(default_factory=set)

    def alive(self, now: int) -> bool:
        return self.gone_at is None or now < self.gone_at


@dataclass(slots=True)
class Call:
    """A create on its way. ``effect_at`` None: it never has one. The answer is there at ``answer_at``."""

    uid: int
    attempt: int
    sequence: int
    token: str
    effect_at: int | None
    answer_at: int
    answer: str  # accepted, avoided, rejected, lost
    machine: Machine | None = None


@dataclass(slots=True)
class Claim:
    """The claim object, and what the world knows of it. ``version`` is its resourceVersion."""

    uid: int
    version: int = 0
    deleting: bool = False
    finished: bool = False  # its Pod is terminal
    gone: bool = False
    mark: tuple[int, int] | None = None  # sequence, send_by
    instance: int | None = None
    unrecorded: tuple[int, ...] = ()  # machines that no row could take down
    bound: int | None = None  # ghost: the machine that a caller was told of
    released: bool = False  # ghost: release has said so

    @property
    def wanted(self) -> bool:
        return not (self.deleting or self.finished or self.gone)


@dataclass(slots=True)
class Attempt:
    """``rebuilt``: only the mark remembers it, so that the exact request is not known any more."""

    number: int
    sequence: int
    send_by: int
    created_at: int
    sends: int = 1
    outcome: str | None = None
    rebuilt: bool = False


@dataclass(slots=True)
class Run:
    id: int
    attempt: int
    accepted_at: int | None
    seen: bool
    gone: bool = False


@dataclass(slots=True)
class Rental:
    """A claim's rows. ``none``: there are runs, and no rental."""

    state: str = "none"
    main: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def unsettled(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.outcome is None]

    def copy(self) -> "Rental":
        """What a reader got: later changes do not touch it."""
        attempts = [copy.copy(attempt) for attempt in self.attempts]
        runs = {run_id: copy.copy(run) for run_id, run in self.runs.items()}
        return Rental(self.state, self.main, attempts, runs, set(self.seen))


@dataclass(slots=True)
class Rows:
    """The store's contents: what a backup holds."""

    epoch: int = 0
    sequence: int = 0
    rentals: dict[int, Rental] = field(default_factory=dict)

    def opened(self, uid: int) -> Rental:
        """The rental, made open where there was none."""
        rental = self.rentals.setdefault(uid, Rental())
        if rental.state == "none":
            rental.state = "open"
        return rental

    def copy(self) -> "Rows":
        return Rows(self.epoch, self.sequence, {uid: one.copy() for uid, one in self.rentals.items()})


@dataclass(slots=True, kw_only=True)
class Faults:
    """How this world misbehaves: chances between 0 and 1, drawn once for each schedule."""

    lost: float = 0.0  # a create's answer
    refused: float = 0.0  # a create
    late: float = 0.0  # effects come late, machines are shown late
    flap: float = 0.0  # a complete list leaves a machine out
    unknown: float = 0.0  # a list, get or terminate without a usable answer
    ignored: float = 0.0  # an accepted terminate that is not carried out
    commit: float = 0.0  # a commit without an answer
    tokens: bool = False  # whether this cloud's tokens mean anything
    stall: bool = False  # whether a sender may stand still between its fence and its send


class World:
    """Everything outside the controllers."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng, self.faults = rng, faults
        self.now = 0
        self.claims: dict[int, Claim] = {}
        self.rows = Rows()
        self.backups: list[Rows] = []
        self.store_away = False
        self.restored = 0  # how often; a client can tell one server, or one life of it, from the next
        self.lease: tuple[str | None, int, int] = (None, -LEASE, 0)  # holder, renewed at, epoch
        self.machines: dict[int, Machine] = {}
        self.calls: list[Call] = []
        self.stalled: set[str] = set()  # tokens that were sent by a sender who stood still
        self.log: list[str] = []
        self.verbose = False
        self.asked = 0  # ghosts: how many transactions and looks there were
        self.looks = 0

    def note(self, text: str) -> None:
        if self.verbose:
            self.log.append(f"{self.now:4} {text}")

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def below(self, limit: int) -> int:
        return int(self.rng.random() * limit)

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now += 1
        for call in list(self.calls):
            if call.effect_at is not None and call.effect_at <= self.now and call.machine is None:
                self._take_effect(call)
            if call.machine is not None or call.effect_at is None:
                self.calls.remove(call)

    # --- the store --------------------------------------------------------------------------------

    def store(self, transaction: Callable[[Rows], T]) -> T:
        """Run it, all or nothing. A commit's answer may get lost."""
        if self.store_away:
            raise Away
        self.asked += 1
        result = transaction(self.rows)
        if self.chance(self.faults.commit):
            raise Away
        return result

    def backup(self) -> None:
        self.backups = [*self.backups[-2:], self.rows.copy()]

    def restore(self) -> None:
        if self.backups:
            self.rows = self.backups[self.below(len(self.backups))].copy()
            self.restored += 1

    # --- the cluster ------------------------------------------------------------------------------

    def look(self, uid: int) -> Claim | None:
        """The claim as it is now: a copy. None: a live GET says that there is none."""
        self.looks += 1
        claim = self.claims[uid]
        return None if claim.gone else copy.copy(claim)

    def write_mark(self, uid: int, mark: tuple[int, int], *, version: int | None) -> None:
        claim = self.claims[uid]
        if claim.gone or (version is not None and claim.version != version):
            raise Refused
        if claim.mark is not None and mark[0] < claim.mark[0]:
            raise Refused  # the claim's schema lets a mark only grow
        claim.mark, claim.version = mark, claim.version + 1

    def write_unrecorded(self, uid: int, machines: tuple[int, ...], *, version: int) -> None:
        claim = self.claims[uid]
        if claim.gone or claim.version != version:
            raise Refused
        claim.unrecorded, claim.version = machines, claim.version + 1

    def tell_bound(self, uid: int, machine: int) -> None:
        """A caller was told that this machine is the claim's: it is on the status from now on."""
        claim = self.claims[uid]
        if claim.wanted:
            if claim.bound is not None and claim.bound != machine:
                raise Broken(f"claim {uid} had machine {claim.bound}, and is given {machine}")
            claim.bound = claim.instance = machine
            claim.version += 1

    def drop_finalizer(self, uid: int) -> None:
        claim = self.claims[uid]
        if claim.gone or not claim.deleting:
            return
        claim.gone = True
        for machine in self.of(uid):
            if machine.token not in self.stalled:
                raise Broken(f"claim {uid}: the finalizer goes while machine {machine.id} is there")
        self.note(f"claim {uid}: finalizer off")

    # --- the cloud --------------------------------------------------------------------------------

    def of(self, uid: int) -> list[Machine]:
        """The claim's machines that are there."""
        return [one for one in self.machines.values() if one.uid == uid and one.alive(self.now)]

    def create(self, uid: int, attempt: int, sequence: int, *, who: str, stood: bool = False) -> Call:
        """Send a create; what comes of it is decided now, and happens later."""
        claim, faults, now = self.claims[uid], self.faults, self.now
        token = f"{uid}-{attempt}-{sequence}"
        if stood:
            self.stalled.add(token)
        elif claim.released:
            raise Broken(f"claim {uid}: a create is sent after its release")
        answer = "accepted"
        if self.chance(faults.refused):
            answer = "avoided" if self.chance(0.6) else "rejected"
        elif self.chance(faults.lost):
            answer = "lost"
        happens = answer == "accepted" or (answer == "lost" and self.chance(0.7))
        delay = self.below(TIMEOUT + 1) if self.chance(faults.late) else 0
        effect_at = now + delay if happens else None
        answer_at = now + TIMEOUT if answer == "lost" else now + delay + self.below(TIMEOUT - delay + 1)
        call = Call(uid, attempt, sequence, token, effect_at, answer_at, answer)
        self.note(f"{who} sends {token}: {answer}, effect {effect_at}")
        if effect_at == now:
            self._take_effect(call)
        elif effect_at is not None:
            self.calls.append(call)
        return call

    def _take_effect(self, call: Call) -> None:
        if self.faults.tokens:
            for machine in self.machines.values():
                if machine.token == call.token and self.now < machine.made_at + REPLAY_FOR:
                    call.machine = machine
                    return
        claim, late = self.claims[call.uid], self.chance(self.faults.late)
        shown_at = self.now + (self.below(SETTLE + 1) if late else 0)
        machine = Machine(
            id=len(self.machines) + 1,
            uid=call.uid,
            attempt=call.attempt,
            sequence=call.sequence,
            token=call.token,
            made_at=self.now,
            lists_at=shown_at,
            gets_at=self.now + (self.below(shown_at - self.now + 1)),
        )
        others = [one for one in self.of(call.uid) if one.token not in self.stalled]
        self.machines[machine.id] = call.machine = machine
        self.note(f"machine {machine.id} of {call.token} is there, listed from {shown_at}")
        if call.token in self.stalled:
            return
        if others:
            raise Broken(f"claim {call.uid} has machines {others[0].id} and {machine.id}: a double")
        if claim.gone and not claim.released:
            return  # somebody else took the finalizer off
        if claim.gone:
            raise Broken(f"claim {call.uid}: machine {machine.id} comes after its finalizer went")
        if claim.bound is not None:
            raise Broken(f"claim {call.uid} had machine {claim.bound}, and gets {machine.id}")

    def vanish(self, machine: Machine) -> None:
        """It is gone, and nobody of ours did it."""
        machine.gone_at = min(self.now, machine.gone_at or self.now)
        self.note(f"machine {machine.id} vanishes")

    def believed_gone(self, machine_id: int) -> None:
        """A caller was told that the claim's machine is gone."""
        machine = self.machines[machine_id]
        if machine.alive(self.now):
            raise Broken(f"machine {machine_id} of claim {machine.uid} is called gone, and is there")

    def listed(self, who: str) -> dict[int, Machine]:
        """A complete list as of this moment, or `Unknown`."""
        if self.chance(self.faults.unknown):
            raise Unknown
        shown = {}
        for machine in self.machines.values():
            gone = machine.gone_at is not None and self.now >= machine.gone_at
            if gone and not (machine.gone_at is not None and self.now < machine.gone_at + 2):
                continue
            if gone and not self.chance(self.faults.late):
                continue
            if self.now < machine.lists_at:
                if self.now < machine.made_at + 1 or not self.chance(self.faults.flap):
                    continue
            elif not gone and who not in machine.hidden_from and self.chance(self.faults.flap):
                machine.hidden_from.add(who)  # never left out twice running
                continue
            machine.hidden_from.discard(who)
            machine.gets_at = min(machine.gets_at, self.now)  # an id that was shown once is known
            shown[machine.id] = machine
        return shown

    def get(self, machine_id: int) -> Machine | None:
        if self.chance(self.faults.unknown):
            raise Unknown
        machine = self.machines.get(machine_id)
        if machine is None or self.now < machine.gets_at or not machine.alive(self.now):
            return None
        return machine

    def terminate(self, machine_id: int, *, who: str) -> str:
        """``accepted``, or ``not_found``, which of a fresh id means nothing."""
        machine = self.machines[machine_id]
        claim = self.claims[machine.uid]
        if claim.bound == machine_id and claim.wanted and machine.alive(self.now):
            raise Broken(f"machine {machine_id} of claim {machine.uid}, which is bound, is ended")
        if self.chance(self.faults.unknown) and self.chance(0.5):
            raise Unknown
        if self.now < machine.gets_at or not machine.alive(self.now):
            return "not_found"
        machine.asked = True
        if not self.chance(self.faults.ignored) and machine.gone_at is None:
            machine.gone_at = self.now + (self.below(END_LAG) if self.chance(self.faults.late) else 0)
        self.note(f"{who} ends machine {machine_id}: gone at {machine.gone_at}")
        if self.chance(self.faults.unknown):
            raise Unknown
        return "accepted"
