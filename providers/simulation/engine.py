"""A simulated cloud's machines and what becomes of them, free of any protocol.

Nothing here waits: whatever a machine does by itself is due at a known time, and `Engine.advance` carries out
all that has become due, in order and with the time at which it was due. So a bill does not depend on how busy
the simulator was, nor on whether it was down in between.

Capacity is counted in GPUs (machines where there is no accelerator), by region, tier and accelerator: a
machine of count n needs n of them at once, from booting until it is gone.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any

from providers.base import Tier
from providers.simulation.clock import Clock, micros
from providers.simulation.faults import Faults
from providers.simulation.scenario import Life, Offer, Scenario
from providers.simulation.state import Journal, Machine, StateError

Pool = tuple[str, str, str]  # region, tier, accelerator in lower case ("" for none)
Meters = list[tuple[str, str, str | None]]


class Refusal(StrEnum):
    """Why a simulated cloud refuses a call; each simulator says it in its cloud's own codes."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    AUTH = "auth"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    PRICE = "price"
    TOKEN = "token"  # the same token with another request: the first machine exists
    UNKNOWN_REGION = "unknown_region"
    NO_SUCH_MACHINE = "no_such_machine"


class Refused(Exception):
    """A call was refused and had no effect."""

    def __init__(self, reason: Refusal, message: str, *, host: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.host = host


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a create asks for. ``exit_after_s`` and ``exit_code`` script the workload, None as the scenario.

    ``digest`` stands for the exact request: the same token with another one is refused.
    """

    name: str | None
    region: str
    tier: Tier
    accelerator: str | None
    count: int
    token: str | None = None
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    disk_gib: int | None = None
    ceiling_usd_per_hour: Decimal | None = None
    avoid_hosts: frozenset[str] = frozenset()
    exit_after_s: float | None = None
    exit_code: int | None = None
    account: str | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    machine: Machine
    replayed: bool


class Engine:
    """One cloud over one journal. Every method is called from one event loop, after `advance`."""

    def __init__(self, scenario: Scenario, journal: Journal, *, real_now: int) -> None:
        """Continue from the journal, or begin anew where it is empty.

        Raises:
            StateError: the journal belongs to another account's cloud, or is damaged.
        """
        self.scenario = scenario
        self.journal = journal
        self.life: Life = scenario.life
        self.clock = Clock(anchor=real_now, scale=scenario.clock.scale, skew_s=scenario.clock.skew_s)
        self.faults = Faults(lambda dumped: journal.append("faults", dumped))
        self.machines: dict[str, Machine] = {}
        self.creates: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self._by_token: dict[str, Machine] = {}
        self._visible: dict[str, Machine] = {}  # whatever a list or a get may still show
        self._offers: dict[tuple[str, str], Offer] = {}
        self._prices: dict[Pool, Decimal | None] = {}
        self._capacity: dict[Pool, int] = {}
        self._used: Counter[Pool] = Counter()
        self._gpus = 0
        self._changed: dict[str, Any] = {"capacity": {}, "prices": {}, "life": None}
        self._waiting: dict[Pool, deque[Machine]] = {}
        self._events: list[tuple[int, int, int, str, str]] = []
        self._number = 0
        self._order = 0
        for offer in scenario.offers:
            for region in scenario.regions_of(offer):
                name = (offer.accelerator or "").lower()
                self._offers[(region, name)] = offer
                for tier, usd in offer.usd_per_hour.items():
                    self._prices[(region, tier, name)] = usd
                    if tier in offer.capacity:
                        self._capacity[(region, tier, name)] = offer.capacity[tier]
        self._restore()

    # --- time ---------------------------------------------------------------------------------

    def advance(self) -> int:
        """Carry out what has become due; the cloud's time now, in microseconds."""
        now = self.clock.now()
        while self._events and self._events[0][0] <= now:
            at, _, _, machine_id, event = heapq.heappop(self._events)
            machine = self.machines[machine_id]
            if machine.due.get(event) == at:  # else it was put off or has become pointless
                del machine.due[event]
                self._happen(machine, event, at)
        return now

    # --- what clients do ----------------------------------------------------------------------

    def create(self, order: Order, *, now: int, phantom: bool = False) -> Created:
        """Order a machine, or find the one that this token made before.

        Raises:
            Refused: nothing was ordered.
        """
        if order.token and (before := self._replay(order.token, now=now)):
            if before.digest != order.digest:
                raise Refused(Refusal.TOKEN, "this token was used for another request")
            return Created(machine=before, replayed=True)
        offer = self._offer_of(order)
        pool = _pool(order.region, order.tier, order.accelerator)
        meters = self._meters(pool, offer, count=order.count, disk_gib=order.disk_gib)
        self._check_ceiling(order, meters)
        quota = self.scenario.quota_gpus
        if quota is not None and order.accelerator and self._gpus + order.count > quota:
            raise Refused(Refusal.QUOTA, f"quota: {quota} GPUs for this account")
        room = self._room(pool, order.count)
        if not room and self.scenario.on_no_capacity == "refuse":
            raise Refused(
                Refusal.CAPACITY,
                f"no {order.accelerator or 'machine'} ({order.tier}) left{_in(order.region)}",
            )
        machine = self._new(order, now=now)
        machine.host = self._pick_host(order.avoid_hosts)
        machine.rates = [(now, meters)]
        machine.phantom = phantom
        self._remember(machine)
        if phantom:
            self._enter(machine, "gone", now)
        elif self.life.queue_s or not room:
            self._schedule(machine, "start", now + micros(self.life.queue_s))
            if self.life.max_s is not None:
                self._schedule(machine, "lifetime", now + micros(self.life.max_s))
        else:
            if self.life.max_s is not None:
                self._schedule(machine, "lifetime", now + micros(self.life.max_s))
            self._happen(machine, "start", now)
        self._save(machine)
        self.advance()  # a boot time of nothing is over at once
        return Created(machine=machine, replayed=False)

    def get(self, machine_id: str, *, now: int, region: str | None = None) -> Machine | None:
        """The machine as a get shows it: not too fresh, and gone ones only within the history."""
        machine = self._visible.get(machine_id)
        if machine is None or machine.phantom or (region is not None and region != machine.region):
            return None
        if now < machine.created_at + micros(self.scenario.lag.get_create_s):
            return None
        gone = machine.since("gone")
        if gone is not None and now >= gone + micros(self.scenario.history_s):
            return None
        return machine

    def listed(self, *, now: int, region: str | None = None, account: str | None = None) -> list[Machine]:
        """The machines as a list shows them, oldest first, lags and history included."""
        lag, history = self.scenario.lag, self.scenario.history_s
        fresh = now - micros(lag.list_create_s)
        ended = now - micros(max(lag.list_terminate_s, history))
        wanted = account or self.scenario.account
        shown = []
        for machine in self._visible.values():
            if machine.phantom or machine.account != wanted or machine.created_at > fresh:
                continue
            if region is not None and machine.region != region:
                continue
            if machine.state == "gone" and machine.history[-1][1] <= ended:
                continue
            shown.append(machine)
        return shown

    def shown_state(self, machine: Machine, *, now: int, listed: bool) -> str:
        """Its state for a client; a lagging list still shows the one before ``gone``."""
        lag = micros(self.scenario.lag.list_terminate_s)
        if listed and machine.state == "gone" and now < machine.history[-1][1] + lag:
            alive = [state for state, _ in machine.history if state not in ("ending", "gone")]
            return alive[-1] if alive else "gone"
        return machine.state

    def terminate(self, machine_id: str, *, now: int, region: str | None = None) -> bool:
        """Ask for its end, again if need be. False: there is no such machine (for a get, too)."""
        machine = self.get(machine_id, now=now, region=region)
        if machine is None:
            return False
        machine.terminates += 1
        if machine.state not in ("ending", "gone"):
            self._end(machine, "terminated", now, message="terminated by request")
            if self.life.end_s and machine.state != "queued":
                self._enter(machine, "ending", now)
                self._schedule(machine, "go", now + micros(self.life.end_s))
            else:
                self._enter(machine, "gone", now)
        self._save(machine)
        return True

    def stop(self, machine_id: str, *, now: int, grace_s: float, region: str | None = None) -> bool:
        """Ask the workload to end: code 143 after the grace. False: there is no such machine."""
        machine = self.get(machine_id, now=now, region=region)
        if machine is None:
            return False
        if machine.state in ("queued", "booting", "running") and "stop" not in machine.due:
            self._schedule(machine, "stop", now + micros(grace_s))
            self._save(machine)
            self.advance()
        return True

    # --- what happens to machines -----------------------------------------------------------------

    def exit(self, machine: Machine, *, now: int, code: int, reason: str | None = None) -> None:
        """The workload ends by itself."""
        if machine.state in ("booting", "running"):
            self._end(machine, reason or ("completed" if code == 0 else "failed"), now, code=code)
            self._leave_exited(machine, now)
            self._save(machine)

    def preempt(self, machine: Machine, *, now: int) -> None:
        """The cloud takes the machine back."""
        if machine.state in ("booting", "running"):
            self._end(machine, "preempted", now, message="reclaimed by the cloud")
            if self.life.reclaim_leaves == "gone":
                self._enter(machine, "gone", now)
            else:
                self._leave_exited(machine, now)
            self._save(machine)

    def fail(self, machine: Machine, *, now: int, message: str) -> None:
        """The machine breaks: exited, without a code."""
        if machine.state in ("queued", "booting", "running"):
            self._end(machine, "failed", now, message=message)
            self._leave_exited(machine, now)
            self._save(machine)

    def remove(self, machine: Machine, *, now: int) -> None:
        """It disappears, and nobody says why."""
        if machine.state != "gone":
            self._end(machine, "unknown", now)
            self._enter(machine, "gone", now)
            self._save(machine)

    def plant(self, order: Order, *, now: int, state: str = "running") -> Machine:
        """Put a machine there that nobody ordered here: somebody else's, or one from before. No checks."""
        pool = _pool(order.region, order.tier, order.accelerator)
        offer = self._offers.get((order.region, pool[2]))
        machine = self._new(order, now=now)
        machine.rates = [
            (now, self._meters(pool, offer, count=order.count, disk_gib=order.disk_gib) if offer else [])
        ]
        self._remember(machine)
        self._enter(machine, state, now)
        self._save(machine)
        return machine

    def set_capacity(
        self, *, region: str, tier: Tier, accelerator: str | None, units: int | None, now: int
    ) -> None:
        """From now on so many GPUs; None for no limit. Machines that are there stay."""
        pool = _pool(region, tier, accelerator)
        self._require_pool(pool)
        if units is None:
            self._capacity.pop(pool, None)
        else:
            self._capacity[pool] = units
        self._changed["capacity"]["/".join(pool)] = units
        self.journal.append("changed", self._changed)
        self._serve(pool, now)

    def set_price(
        self, *, region: str, tier: Tier, accelerator: str | None, usd_per_hour: Decimal | None, now: int
    ) -> None:
        """A new price of one GPU; where billing follows the market, for machines that run too."""
        pool = _pool(region, tier, accelerator)
        self._require_pool(pool)
        old, self._prices[pool] = self._prices[pool], usd_per_hour
        self._changed["prices"]["/".join(pool)] = None if usd_per_hour is None else str(usd_per_hour)
        self.journal.append("changed", self._changed)
        if not self.scenario.billing.follow_market or old == usd_per_hour:
            return
        for machine in self._visible.values():
            if machine.state != "gone" and _pool_of(machine) == pool:
                new: Meters = [
                    (kind, quantity, _text(usd_per_hour) if index == 0 else usd)
                    for index, (kind, quantity, usd) in enumerate(machine.rates[-1][1])
                ]
                machine.rates.append((now, new))
                self._save(machine)

    def set_life(self, changes: dict[str, Any]) -> Life:
        """Other durations, for whatever begins from now on.

        Raises:
            pydantic.ValidationError: a field is unknown or wrong.
        """
        self.life = Life.model_validate(self.life.model_dump() | changes)
        self._changed["life"] = self.life.model_dump()
        self.journal.append("changed", self._changed)
        return self.life

    def note_create(self, *, name: str, token: str, now: int) -> None:
        """Remember that a create arrived, whatever becomes of it."""
        self.creates.append({"name": name, "token": token, "at": now})
        self.journal.append("create", self.creates[-1])

    def offers(self) -> Iterator[tuple[str, Tier, Offer, int, Meters]]:
        """Everything that can be rented: region, tier, kind, count and its meters now."""
        for (region, name), offer in self._offers.items():
            for tier in offer.usd_per_hour:
                for count in offer.counts:
                    yield region, tier, offer, count, self._meters((region, tier, name), offer, count=count)

    def capacity(self) -> Iterator[tuple[Pool, int | None, int]]:
        """For each pool: how much there is (None: no limit) and how much is used."""
        for pool in self._prices:
            yield pool, self._capacity.get(pool), self._used[pool]

    # --- inside -------------------------------------------------------------------------------------

    def _happen(self, machine: Machine, event: str, at: int) -> None:
        match event:
            case "start":
                pool = _pool_of(machine)
                if not self._room(pool, machine.count) or self._waiting.get(pool):
                    self._waiting.setdefault(pool, deque()).append(machine)
                    self._serve(pool, at)
                    return
                self._start(machine, at)
            case "run":
                self._enter(machine, "running", at)
                life = self.life
                after_s = machine.exit_after_s if machine.exit_after_s is not None else life.exit_after_s
                if after_s is not None:
                    self._schedule(machine, "exit", at + micros(after_s))
                if life.reclaim_after_s is not None and machine.tier == Tier.SPOT:
                    self._schedule(machine, "reclaim", at + micros(life.reclaim_after_s))
            case "exit":
                self.exit(machine, now=at, code=machine.exit_code_planned)
            case "stop":
                if machine.state == "queued":
                    self._end(machine, "terminated", at, message="stopped before it ran")
                    self._enter(machine, "gone", at)
                else:
                    self.exit(machine, now=at, code=143, reason="terminated")
            case "reclaim":
                self.preempt(machine, now=at)
            case "lifetime":
                self._end(machine, "lifetime", at, message="the longest life was reached")
                self._enter(machine, "gone", at)
            case "go":
                self._enter(machine, "gone", at)
            case "forget":
                self._visible.pop(machine.id, None)
                return
        self._save(machine)

    def _start(self, machine: Machine, at: int) -> None:
        self._enter(machine, "booting", at)
        self._schedule(machine, "run", at + micros(self.life.boot_s))

    def _leave_exited(self, machine: Machine, at: int) -> None:
        self._enter(machine, "exited", at)
        if self.life.exited_s is not None:
            self._schedule(machine, "go", at + micros(self.life.exited_s))

    def _end(
        self, machine: Machine, reason: str, at: int, *, code: int | None = None, message: str = ""
    ) -> None:
        if machine.end_reason is None:  # what ended it first is what is told
            machine.end_reason, machine.ended_at, machine.exit_code = reason, at, code
            machine.end_message = message

    def _enter(self, machine: Machine, state: str, at: int) -> None:
        """The one place where a state changes, so that capacity is always what the states say."""
        held = machine.holds_capacity
        machine.state = state
        machine.history.append((state, at))
        if state in ("exited", "ending", "gone"):
            keep = ("go", "lifetime") if state != "gone" else ()
            machine.due = {event: due for event, due in machine.due.items() if event in keep}
        self._hold(machine, machine.holds_capacity - held)
        if held and not machine.holds_capacity:
            self._serve(_pool_of(machine), at)
        if state == "gone":
            stay_s = max(self.scenario.history_s, self.scenario.lag.list_terminate_s)
            self._schedule(machine, "forget", at + micros(stay_s))

    def _hold(self, machine: Machine, sign: int) -> None:
        if sign and machine.account == self.scenario.account:
            self._used[_pool_of(machine)] += sign * machine.count
            self._gpus += sign * machine.count if machine.accelerator else 0

    def _serve(self, pool: Pool, at: int) -> None:
        """Give what is free to those who wait, first come first served."""
        queue = self._waiting.get(pool)
        while queue:
            if queue[0].state == "queued":
                if not self._room(pool, queue[0].count):
                    return
                self._start(queue[0], at)
                self._save(queue[0])
            queue.popleft()

    def _room(self, pool: Pool, count: int) -> bool:
        limit = self._capacity.get(pool)
        return limit is None or self._used[pool] + count <= limit

    def _schedule(self, machine: Machine, event: str, at: int) -> None:
        machine.due[event] = at
        self._order += 1
        heapq.heappush(self._events, (at, self._order, machine.number, machine.id, event))

    def _replay(self, token: str, *, now: int) -> Machine | None:
        window_s = self.scenario.idempotent_for_s
        before = self._by_token.get(token)
        if window_s is None or before is None or now >= before.created_at + micros(window_s):
            return None
        return before

    def _offer_of(self, order: Order) -> Offer:
        scenario = self.scenario
        if order.region not in (scenario.regions or ("",)):
            raise Refused(Refusal.UNKNOWN_REGION, f"there is no region {order.region!r}")
        offer = self._offers.get((order.region, (order.accelerator or "").lower()))
        what = order.accelerator or "a machine without accelerator"
        if offer is None or order.tier not in offer.usd_per_hour:
            raise Refused(Refusal.UNSUPPORTED, f"{what} is not offered as {order.tier}{_in(order.region)}")
        if order.accelerator and order.count not in offer.counts:
            raise Refused(Refusal.UNSUPPORTED, f"{what} is not offered with {order.count} GPUs")
        if not order.image:
            raise Refused(Refusal.INVALID, "image must not be empty")
        if order.name is not None and not 1 <= len(order.name) <= 63:
            raise Refused(Refusal.INVALID, "name must have 1 to 63 characters")
        return offer

    def _check_ceiling(self, order: Order, meters: Meters) -> None:
        ceiling = order.ceiling_usd_per_hour
        if not self.scenario.check_ceiling or ceiling is None:
            return
        price = sum(
            (Decimal(quantity) * Decimal(usd) for _, quantity, usd in meters if usd is not None), Decimal(0)
        )
        if price > ceiling:
            raise Refused(Refusal.PRICE, f"{price} dollars an hour is above the ceiling of {ceiling}")

    def _meters(self, pool: Pool, offer: Offer, *, count: int, disk_gib: int | None = None) -> Meters:
        usd = _text(self._prices.get(pool))
        meters: Meters = [("gpu", str(count), usd) if offer.accelerator else ("machine", "1", usd)]
        if offer.machine_usd_per_hour:
            meters.append(("machine", "1", str(offer.machine_usd_per_hour)))
        if self.scenario.disk_usd_per_gib_hour is not None:
            gib = max(self.scenario.disk_min_gib, disk_gib or 0)
            meters.append(("disk", str(gib), str(self.scenario.disk_usd_per_gib_hour)))
        return meters

    def _pick_host(self, avoid: frozenset[str]) -> str | None:
        hosts = [f"host-{number}" for number in range(1, self.scenario.hosts + 1)]
        free = [host for host in hosts if host not in avoid]
        if hosts and not free:
            raise Refused(Refusal.CAPACITY, "every host is avoided")
        return free[self._number % len(free)] if free else None

    def _new(self, order: Order, *, now: int) -> Machine:
        self._number += 1
        kind = order.accelerator.lower() if order.accelerator else "cpu"
        return Machine(
            id=f"{self.scenario.cloud}-{self._number:06d}",
            number=self._number,
            name=order.name,
            token=order.token,
            account=order.account or self.scenario.account,
            region=order.region,
            tier=order.tier,
            accelerator=order.accelerator,
            count=order.count,
            shape=f"{kind}x{order.count}",
            state="queued",
            created_at=now,
            image=order.image,
            command=list(order.command),
            args=list(order.args),
            env_names=sorted(order.env_names),
            labels=dict(order.labels),
            digest=order.digest,
            exit_after_s=order.exit_after_s,
            exit_code_planned=self.life.exit_code if order.exit_code is None else order.exit_code,
            history=[("queued", now)],
        )

    def _remember(self, machine: Machine) -> None:
        self.machines[machine.id] = machine
        self._visible[machine.id] = machine
        if machine.token:
            self._by_token[machine.token] = machine

    def _save(self, machine: Machine) -> None:
        self.journal.append("machine", asdict(machine))

    def _require_pool(self, pool: Pool) -> None:
        if pool not in self._prices:
            raise Refused(
                Refusal.UNSUPPORTED, f"{pool[2] or 'no accelerator'} {pool[1]}{_in(pool[0])} is not offered"
            )

    def _restore(self) -> None:
        records: dict[str, Any] = {}
        for kind, value in self.journal.read():
            match kind:
                case "machine":
                    value["history"] = [(state, at) for state, at in value["history"]]
                    value["rates"] = [
                        (at, [tuple(meter) for meter in meters]) for at, meters in value["rates"]
                    ]
                    self.machines[value["id"]] = Machine(**value)
                case "create":
                    self.creates.append(value)
                case _:
                    records[kind] = value
        about = records.setdefault("about", {"account": self.scenario.account, "anchor": self.clock.anchor})
        if about["account"] != self.scenario.account:
            raise StateError(
                f"the state is that of account {about['account']}, not of {self.scenario.account}"
            )
        self.clock = Clock(
            anchor=about["anchor"], scale=self.scenario.clock.scale, skew_s=self.scenario.clock.skew_s
        )
        self.faults.restore(records.get("faults", []))
        self._apply(records.get("changed", self._changed))
        for machine in self.machines.values():
            self._number = max(self._number, machine.number)
            if machine.state != "gone" or "forget" in machine.due:
                self._visible[machine.id] = machine
            if machine.token:
                self._by_token[machine.token] = machine
            if machine.holds_capacity:
                self._hold(machine, 1)
            due = dict(machine.due)
            if machine.state == "queued" and not due.keys() & {"start"}:
                due["start"] = machine.created_at  # it waited for capacity
            for event, at in due.items():
                self._schedule(machine, event, at)
        self.journal.restart(
            [("about", about), ("changed", self._changed), ("faults", self.faults.dump())]
            + [("create", create) for create in self.creates]
            + [("machine", asdict(machine)) for machine in self.machines.values()]
        )

    def _apply(self, changed: dict[str, Any]) -> None:
        self._changed = changed
        for name, units in changed["capacity"].items():
            region, tier, accelerator = name.split("/")
            if units is None:
                self._capacity.pop((region, tier, accelerator), None)
            else:
                self._capacity[(region, tier, accelerator)] = units
        for name, usd in changed["prices"].items():
            region, tier, accelerator = name.split("/")
            self._prices[(region, tier, accelerator)] = None if usd is None else Decimal(usd)
        if changed["life"] is not None:
            self.life = Life.model_validate(changed["life"])


def _pool(region: str, tier: Tier, accelerator: str | None) -> Pool:
    return (region, tier.value, (accelerator or "").lower())


def _pool_of(machine: Machine) -> Pool:
    return _pool(machine.region, Tier(machine.tier), machine.accelerator)


def _text(usd: Decimal | None) -> str | None:
    return None if usd is None else str(usd)


def _in(region: str) -> str:
    return f" in {region}" if region else ""
