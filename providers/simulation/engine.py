"""A simulated cloud's machines and what becomes of them, free of any protocol.

Nothing here waits: whatever a machine does by itself is due at a known time, and `Engine.advance` carries out
all that has become due, in order and with the time at which it was due. So a bill does not depend on how busy
the simulator was, nor on whether it was down in between.

Capacity is counted in GPUs (machines where there is no accelerator), by region, tier and accelerator: a
machine of count n needs n of them at once, from booting until it is gone.
"""

import asyncio
import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

from providers.base import Tier
from providers.simulation.clock import Clock, micros, real_time
from providers.simulation.doors import Doors
from providers.simulation.faults import Faults
from providers.simulation.market import Market, Meters, Pool, pool_of, pool_of_order, text, within
from providers.simulation.orders import Order, Refusal, Refused
from providers.simulation.processes import Processes
from providers.simulation.scenario import Life, Scenario
from providers.simulation.sockets import LOOPBACK
from providers.simulation.state import Journal, Machine, StateError, Thing
from providers.simulation.streams import Streams

_HOST_LOST = "the host of the machine was lost"  # with the processes, when the simulator ended
_TIMERS_S = 3600.0  # what is due later than that is carried out when somebody looks

_LOOP_S = 1.0  # the least that a workload runs before it is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    machine: Machine
    replayed: bool


class Engine:
    """One cloud over one journal. Every method is called from one event loop, after `advance`."""

    def __init__(
        self,
        scenario: Scenario,
        journal: Journal,
        *,
        real: Callable[[], int] = real_time,
        host: str = LOOPBACK,
    ) -> None:
        """Continue from the journal, or begin anew where it is empty.

        ``real`` is the machine's own clock, ``host`` where streams are reached.

        Raises:
            StateError: the journal belongs to another account's cloud, or is damaged.
        """
        self.scenario = scenario
        self.journal = journal
        self.life: Life = scenario.life
        facts = scenario.clock
        self.clock = Clock(anchor=real(), scale=facts.scale, skew_s=facts.skew_s, real=real)
        self.faults = Faults(lambda dumped: journal.append("faults", dumped))
        self.doors = Doors(scenario.serve, now=self.clock.now, scale=facts.scale)
        self.streams = Streams(host)
        self.processes: Processes | None = None
        if scenario.processes is not None:
            self.processes = Processes(
                scenario.processes, clock=lambda: self.clock, ended=self._process_ended
            )
        self.machines: dict[str, Machine] = {}
        self.things: dict[str, Thing] = {}
        self.creates: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self._by_token: dict[str, Machine] = {}
        self._visible: dict[str, Machine] = {}  # whatever a list or a get may still show
        self.market = Market(scenario)
        self._waiting: dict[Pool, deque[Machine]] = {}
        self._events: list[tuple[int, int, int, str, str]] = []
        self.id_of: Callable[[int], str] = lambda number: f"{scenario.cloud}-{number:06d}"
        self.kept: dict[str, Any] = {}
        self._number = 0
        self._order = 0
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
            if before.digest != order.digest and self.scenario.on_token_reuse == "refuse":
                raise Refused(Refusal.TOKEN, "this token was used for another request")
            return Created(machine=before, replayed=True)
        market, pool = self.market, pool_of_order(order)
        market.offer_of(order)
        meters = market.meters(order)
        market.check_ceiling(order, meters)
        market.check_quota(order)
        room = market.room(pool, order.count)
        if not room and self.scenario.on_no_capacity == "refuse":
            what = f"{order.accelerator or 'machine'} ({order.tier})"
            raise Refused(Refusal.CAPACITY, f"no {what} left{within(order.region)}")
        machine = self._new(order, now=now)
        machine.host = self._pick_host(order.avoid_hosts)
        machine.rates = [(now, meters)]
        machine.phantom = phantom
        self._remember(machine)
        if self.processes is not None and not phantom:
            self.processes.prepare(machine, order)
        if phantom:
            self._enter(machine, "gone", now)
        else:
            if order.expires_after_s is not None and self.scenario.dead_man:
                self._schedule(machine, "expire", now + micros(order.expires_after_s))
            if self.life.max_s is not None:
                self._schedule(machine, "lifetime", now + micros(self.life.max_s))
            if self.life.queue_s or not room:
                self._schedule(machine, "start", now + micros(self.life.queue_s))
            else:
                self._happen(machine, "start", now)
        self._save(machine)
        if self.scenario.keys and not phantom:
            self.put_thing("key", name=order.name, region=order.region, now=now, machine=machine.id)
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
        """Ask the workload to end: when it is ready to, or by force at the end of the grace.

        A repeat can only shorten the grace. False: there is no such machine.
        """
        machine = self.get(machine_id, now=now, region=region)
        if machine is None:
            return False
        machine.stops += 1
        if machine.state in ("queued", "booting", "running"):
            takes_s = self.life.stop_s if machine.stop_after_s is None else machine.stop_after_s
            if self.processes is not None and machine.state == "running":
                self.processes.ask_to_end(machine.id)
            elif takes_s <= grace_s and machine.state == "running":
                machine.due.setdefault("stop", now + micros(takes_s))
                self._schedule(machine, "stop", machine.due["stop"])
            kill = now + micros(grace_s)
            self._schedule(machine, "kill", min(kill, machine.due.get("kill", kill)))
        self._save(machine)
        self.advance()
        return True

    def extend(self, machine_id: str, *, now: int, for_s: float, region: str | None = None) -> bool:
        """Put its limit off, if it has one; never nearer. False: there is no such machine."""
        machine = self.get(machine_id, now=now, region=region)
        if machine is None or machine.state == "gone":
            return False
        due = machine.due.get("expire")
        if due is not None:
            self._schedule(machine, "expire", max(due, now + micros(for_s)))
            self._save(machine)
        return True

    def restart(self, machine_id: str, *, now: int, region: str | None = None) -> bool:
        """Start the workload again on its machine. False: there is no such machine, or it is past that.

        Raises:
            Refused: this cloud cannot, or the machine does not run yet.
        """
        if not self.scenario.restarts:
            raise Refused(Refusal.INVALID, "this cloud starts a workload once")
        machine = self.get(machine_id, now=now, region=region)
        by_itself = machine is not None and machine.exit_code is not None
        if machine is None or machine.state not in ("booting", "queued", "running", "exited"):
            return False
        if machine.state == "exited" and not by_itself:
            return False  # the machine is broken, or was taken back
        if machine.state in ("running", "exited"):
            machine.restarts += 1
            machine.end_reason, machine.end_message, machine.ended_at, machine.exit_code = (
                None,
                "",
                None,
                None,
            )
            for event in ("exit", "stop", "kill", "reclaim", "go"):
                machine.due.pop(event, None)
            self._enter(machine, "booting", now)
            self._schedule(machine, "run", now + micros(self.life.restart_s))
            self._save(machine)
            self.advance()
        return True

    def close(self) -> None:
        """Nothing of this cloud listens or runs any more."""
        self.doors.close()
        self.streams.close()
        if self.processes is not None:
            self.processes.close()

    # --- what stands beside machines ------------------------------------------------------------------

    def put_thing(
        self,
        kind: str,
        *,
        name: str | None,
        region: str,
        now: int,
        machine: str | None = None,
        account: str | None = None,
    ) -> Thing:
        """One more key, template or login; ``machine`` is in whose use it is."""
        thing = Thing(
            id=f"{kind}-{len(self.things) + 1:06d}",
            kind=kind,
            name=name,
            region=region,
            account=account or self.scenario.account,
            created_at=now,
            machine=machine,
        )
        self.things[thing.id] = thing
        self.journal.append("thing", asdict(thing))
        return thing

    def in_use(self, thing: Thing) -> bool:
        """Whether its machine is still there."""
        machine = self.machines.get(thing.machine or "")
        return machine is not None and machine.state != "gone"

    def drop_thing(self, thing_id: str) -> bool | None:
        """Delete one. False: it is in use; None: there is none."""
        thing = self.things.get(thing_id)
        if thing is None or thing.dropped:
            return None
        if self.in_use(thing):
            return False
        thing.dropped = True
        self.journal.append("thing", asdict(thing))
        return True

    # --- what happens to machines -----------------------------------------------------------------

    def exit(self, machine: Machine, *, now: int, code: int, reason: str | None = None) -> None:
        """The workload ends by itself."""
        if machine.labels.get("stays") and reason is None and machine.state == "running":
            machine.exit_code, machine.ended_at = code, now  # its shell waits
            self._save(machine)
        elif self.life.exit_restarts and reason is None and machine.state == "running":
            machine.restarts += 1
            self._happen(machine, "run", now)
            self._save(machine)
        elif machine.state in ("booting", "running"):
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

    def rename(self, machine: Machine, *, name: str | None) -> None:
        """Somebody edits its name in the cloud's console."""
        machine.name = name
        self._save(machine)

    def plant(self, order: Order, *, now: int, state: str = "running") -> Machine:
        """Put a machine there that nobody ordered here: somebody else's, or one from before. No checks."""
        machine = self._new(order, now=now)
        machine.rates = [(now, self.market.meters(order))]
        self._remember(machine)
        self._enter(machine, state, now)
        self._save(machine)
        return machine

    def set_capacity(
        self, *, region: str, tier: Tier, accelerator: str | None, units: int | None, now: int
    ) -> None:
        """From now on so many GPUs; None for no limit. Machines that are there stay."""
        pool = self.market.pool(region=region, tier=tier, accelerator=accelerator)
        self.market.set_capacity(pool, units)
        self.journal.append("market", self.market.changed)
        self._serve(pool, now)

    def set_price(
        self, *, region: str, tier: Tier, accelerator: str | None, usd_per_hour: Decimal | None, now: int
    ) -> None:
        """A new price of one GPU; where billing follows the market, for machines that run too."""
        pool = self.market.pool(region=region, tier=tier, accelerator=accelerator)
        moved = self.market.set_price(pool, usd_per_hour)
        self.journal.append("market", self.market.changed)
        if not moved or not self.scenario.billing.follow_market:
            return
        for machine in self._visible.values():
            if machine.state != "gone" and pool_of(machine) == pool:
                new: Meters = [
                    (kind, quantity, text(usd_per_hour) if index == 0 else usd)
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
        self.journal.append("life", self.life.model_dump())
        return self.life

    def keep(self, name: str, value: Any) -> None:
        """Remember something of one simulator's own, over restarts."""
        self.kept[name] = value
        self.journal.append("kept", self.kept)

    def note_create(self, *, name: str, token: str, now: int) -> None:
        """Remember that a create arrived, whatever becomes of it."""
        self.creates.append({"name": name, "token": token, "at": now})
        self.journal.append("create", self.creates[-1])

    def _process_ended(self, machine_id: str, code: int) -> None:
        """A machine's own process is over, by itself or because the machine is."""
        now = self.advance()
        machine = self.machines[machine_id]
        if machine.state == "running":
            self.exit(machine, now=now, code=code, reason="terminated" if machine.stops else None)

    # --- inside -------------------------------------------------------------------------------------

    def _happen(self, machine: Machine, event: str, at: int) -> None:
        match event:
            case "start":
                pool = pool_of(machine)
                if not self.market.room(pool, machine.count) or self._waiting.get(pool):
                    self._waiting.setdefault(pool, deque()).append(machine)
                    self._serve(pool, at)
                    return
                self._start(machine, at)
            case "run" if machine.pull_problem:
                self.fail(machine, now=at, message=machine.pull_problem)
            case "run":
                if self.processes is not None and not self.processes.known(machine.id):
                    self.fail(machine, now=at, message=_HOST_LOST)
                    return
                self._enter(machine, "running", at)
                life = self.life
                after_s = machine.exit_after_s if machine.exit_after_s is not None else life.exit_after_s
                if after_s is not None:
                    after_s = max(after_s, _LOOP_S) if life.exit_restarts else after_s
                    self._schedule(machine, "exit", at + micros(after_s))
                if life.reclaim_after_s is not None and machine.tier == Tier.SPOT:
                    self._schedule(machine, "reclaim", at + micros(life.reclaim_after_s))
            case "exit":
                self.exit(machine, now=at, code=machine.exit_code_planned)
            case "stop":
                code = 143 if machine.stop_code is None else machine.stop_code
                self.exit(machine, now=at, code=code, reason="terminated")
            case "kill":
                if machine.state == "queued":
                    self._end(machine, "terminated", at, message="stopped before it ran")
                    self._enter(machine, "gone", at)
                else:
                    self.exit(machine, now=at, code=137, reason="terminated")
            case "reclaim":
                self.preempt(machine, now=at)
            case "lifetime":
                self._end(machine, "lifetime", at, message="the longest life was reached")
                self._enter(machine, "gone", at)
            case "expire":
                self._end(machine, "lifetime", at, message="nobody has extended its life")
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
            keep = ("go", "lifetime", "expire") if state != "gone" else ()
            machine.due = {event: due for event, due in machine.due.items() if event in keep}
        self.market.hold(machine, machine.holds_capacity - held)
        if held and not machine.holds_capacity:
            self._serve(pool_of(machine), at)
        self.doors.follow(machine)
        if self.processes is not None:
            self.processes.follow(machine)
        if state == "gone":
            stay_s = max(self.scenario.history_s, self.scenario.lag.list_terminate_s)
            self._schedule(machine, "forget", at + micros(stay_s))

    def _serve(self, pool: Pool, at: int) -> None:
        """Give what is free to those who wait, first come first served."""
        queue = self._waiting.get(pool)
        while queue:
            if queue[0].state == "queued":
                if not self.market.room(pool, queue[0].count):
                    return
                self._start(queue[0], at)
                self._save(queue[0])
            queue.popleft()

    def _schedule(self, machine: Machine, event: str, at: int) -> None:
        machine.due[event] = at
        self._order += 1
        heapq.heappush(self._events, (at, self._order, machine.number, machine.id, event))
        if self.processes is not None:  # a process starts when it is due, not when somebody looks
            wait_s = max(0.0, (at - self.clock.now()) / micros(1) / self.clock.scale)
            if wait_s < _TIMERS_S:
                with contextlib.suppress(RuntimeError):  # at the start there is no loop, and nothing to start
                    asyncio.get_running_loop().call_later(wait_s, self.advance)

    def _replay(self, token: str, *, now: int) -> Machine | None:
        window_s = self.scenario.idempotent_for_s
        before = self._by_token.get(token)
        if window_s is None or before is None or now >= before.created_at + micros(window_s):
            return None
        return before

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
            id=self.id_of(self._number),
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
            env=dict(order.env),
            ports=list(order.ports),
            pull_problem=order.pull_problem,
            labels=dict(order.labels),
            digest=order.digest,
            exit_after_s=order.exit_after_s,
            exit_code_planned=self.life.exit_code if order.exit_code is None else order.exit_code,
            stop_after_s=order.stop_after_s,
            stop_code=order.stop_code,
            history=[("queued", now)],
        )

    def _remember(self, machine: Machine) -> None:
        self.machines[machine.id] = machine
        self._visible[machine.id] = machine
        if machine.token:
            self._by_token[machine.token] = machine

    def _save(self, machine: Machine) -> None:
        self.journal.append("machine", asdict(machine))

    def _restore(self) -> None:
        records: dict[str, Any] = {}
        for kind, value in self.journal.read():
            match kind:
                case "machine":
                    value.pop("env_names", None)  # of an earlier version
                    value["history"] = [(state, at) for state, at in value["history"]]
                    value["rates"] = [
                        (at, [tuple(meter) for meter in meters]) for at, meters in value["rates"]
                    ]
                    self.machines[value["id"]] = Machine(**value)
                case "create":
                    self.creates.append(value)
                case "thing":
                    self.things[value["id"]] = Thing(**value)
                case _:
                    records[kind] = value
        about = records.setdefault("about", {"account": self.scenario.account, "anchor": self.clock.anchor})
        if "account" not in self.scenario.model_fields_set:  # nobody named it: it is what it was
            self.scenario = self.scenario.model_copy(update={"account": about["account"]})
            self.market = Market(self.scenario)
        if about["account"] != self.scenario.account:
            raise StateError(
                f"the state is that of account {about['account']}, not of {self.scenario.account}"
            )
        self.clock = replace(self.clock, anchor=about["anchor"])
        self.faults.restore(records.get("faults", []))
        if "market" in records:
            self.market.restore(records["market"])
        if "life" in records:
            self.life = Life.model_validate(records["life"])
        self.kept = records.get("kept", {})
        for machine in self.machines.values():
            self._number = max(self._number, machine.number)
            if machine.state != "gone" or "forget" in machine.due:
                self._visible[machine.id] = machine
            if machine.token:
                self._by_token[machine.token] = machine
            if machine.holds_capacity:
                self.market.hold(machine, 1)
            due = dict(machine.due)
            if machine.state == "queued" and not due.keys() & {"start"}:
                due["start"] = self.clock.now()  # it waited for capacity, and goes on waiting
            for event, at in due.items():
                self._schedule(machine, event, at)
            if self.processes is not None and machine.state == "running":
                self.fail(machine, now=self.clock.now(), message=_HOST_LOST)
        kept = [("about", about), ("market", self.market.changed), ("faults", self.faults.dump())]
        if "life" in records:
            kept.append(("life", records["life"]))
        if self.kept:
            kept.append(("kept", self.kept))
        self.journal.restart(
            kept
            + [("create", create) for create in self.creates]
            + [("machine", asdict(machine)) for machine in self.machines.values()]
            + [("thing", asdict(thing)) for thing in self.things.values()]
        )
