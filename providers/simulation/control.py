"""The control API of every simulator, under ``/sim``: the truth for tests, and the hands of fate.

No fault touches it and it asks for no credential; it listens where the simulated cloud does, which is the
loopback interface. All bodies are JSON; a wrong one answers 400 with ``error``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from providers.base import Tier
from providers.simulation.clock import as_text
from providers.simulation.engine import Engine
from providers.simulation.faults import Fault
from providers.simulation.http import Answer, json_endpoint
from providers.simulation.meter import bill_usd, billed_s
from providers.simulation.orders import Order
from providers.simulation.state import Machine

Doing = Callable[[Request, Any], Answer]


def routes(engine: Engine) -> list[BaseRoute]:
    """Everything under ``/sim`` for one engine."""
    api = _Control(engine)
    table: list[tuple[str, str, Doing]] = [
        ("GET", "/sim/truth", api.truth),
        ("GET", "/sim/faults", api.list_faults),
        ("POST", "/sim/faults", api.add_fault),
        ("DELETE", "/sim/faults", api.clear_faults),
        ("DELETE", "/sim/faults/{id}", api.clear_faults),
        ("POST", "/sim/pause", api.pause),
        ("POST", "/sim/capacity", api.set_capacity),
        ("POST", "/sim/price", api.set_price),
        ("POST", "/sim/life", api.set_life),
        ("POST", "/sim/machines", api.plant),
        ("POST", "/sim/machines/{id}/{what}", api.happen),
        ("GET", "/sim/parts", api.list_things),
        ("POST", "/sim/parts", api.put_thing),
    ]
    return [route(engine, *row) for row in table]


def route(engine: Engine, method: str, path: str, doing: Doing) -> BaseRoute:
    return Route(path, json_endpoint(engine, doing), methods=[method])


class _Control:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def truth(self, request: Request, _json: Any) -> Answer:
        """Every machine that ever was (``?name=`` or ``?image=`` that one's), calls, and what it all cost."""
        engine, name = self._engine, request.query_params.get("name")
        image = request.query_params.get("image")
        now = engine.advance()
        machines = [
            self._machine(machine, now)
            for machine in engine.machines.values()
            if name in (None, machine.name) and image in (None, machine.image)
        ]
        bills = [machine["bill_usd"] for machine in machines if machine["bill_usd"] is not None]
        return Answer(
            body={
                "now": as_text(now),
                "account_id": engine.scenario.account,
                "machines": machines,
                "creates": dict(Counter(c["name"] for c in engine.creates if name in (None, c["name"]))),
                "create_calls": [
                    c | {"at": as_text(c["at"])} for c in engine.creates if name in (None, c["name"])
                ],
                "calls": dict(engine.calls),
                "capacity": [
                    {
                        "region": region,
                        "tier": tier,
                        "accelerator": kind or None,
                        "units": limit,
                        "used": used,
                    }
                    for (region, tier, kind), limit, used in engine.market.capacity()
                ],
                "faults": engine.faults.dump(),
                "bill_usd": str(sum(map(Decimal, bills), Decimal(0))),
                "unpriced_machines": len(machines) - len(bills),
            }
        )

    def list_faults(self, _request: Request, _json: Any) -> Answer:
        return Answer(body={"faults": self._engine.faults.dump()})

    def add_fault(self, _request: Request, json: Any) -> Answer:
        engine = self._engine
        fault = engine.faults.add(
            Fault.model_validate(json), now=engine.clock.now(), scale=engine.clock.scale
        )
        return Answer(status=201, body=fault.model_dump(mode="json"))

    def clear_faults(self, request: Request, _json: Any) -> Answer:
        return Answer(body={"removed": self._engine.faults.clear(request.path_params.get("id"))})

    def pause(self, _request: Request, json: Any) -> Answer:
        """Every matching call waits before its effect until the returned fault is cleared."""
        return self.add_fault(_request, {"kind": "hold"} | (json or {}))

    def set_capacity(self, _request: Request, json: Any) -> Answer:
        self._engine.set_capacity(
            region=json.get("region", ""),
            tier=Tier(json["tier"]),
            accelerator=json.get("accelerator"),
            units=None if json["units"] is None else int(json["units"]),
            now=self._engine.clock.now(),
        )
        return Answer(body={})

    def set_price(self, _request: Request, json: Any) -> Answer:
        usd = json["usd_per_hour"]
        self._engine.set_price(
            region=json.get("region", ""),
            tier=Tier(json["tier"]),
            accelerator=json.get("accelerator"),
            usd_per_hour=None if usd is None else Decimal(str(usd)),
            now=self._engine.clock.now(),
        )
        return Answer(body={})

    def set_life(self, _request: Request, json: Any) -> Answer:
        return Answer(body=self._engine.set_life(json).model_dump())

    def plant(self, _request: Request, json: Any) -> Answer:
        """A machine that nobody ordered here: an orphan, somebody else's, or an attempt that came late."""
        order = Order(
            name=json.get("name"),
            region=json.get("region", ""),
            tier=Tier(json.get("tier", Tier.ON_DEMAND)),
            accelerator=json.get("accelerator"),
            count=int(json.get("count", 1)),
            token=json.get("token"),
            account=json.get("account"),
            image=json.get("image", "planted"),
        )
        now = self._engine.clock.now()
        machine = self._engine.plant(order, now=now, state=json.get("state", "running"))
        return Answer(status=201, body=self._machine(machine, now))

    def put_thing(self, _request: Request, json: Any) -> Answer:
        """A key, template, login, group or volume that nobody made by ordering a machine."""
        thing = self._engine.put_thing(
            json["kind"],
            name=json.get("name"),
            region=json.get("region", ""),
            machine=json.get("machine"),
            now=self._engine.clock.now(),
        )
        return Answer(status=201, body=asdict(thing))

    def list_things(self, _request: Request, _json: Any) -> Answer:
        """All that ever were, the dropped ones too."""
        return Answer(body={"items": [asdict(thing) for thing in self._engine.things.values()]})

    def happen(self, request: Request, json: Any) -> Answer:
        """``preempt``, ``exit`` (``code``), ``fail`` (``message``), ``remove``,
        ``rename`` (``name``) or ``health``.

        ``health`` is how its workload answers at its ports: ``status`` (0: never), ``open``, ``location``.
        """
        engine, now = self._engine, self._engine.clock.now()
        machine = engine.machines.get(request.path_params["id"])
        if machine is None:
            return Answer(status=404, body={"error": "no such machine"})
        json = json or {}
        match request.path_params["what"]:
            case "preempt":
                engine.preempt(machine, now=now)
            case "exit":
                engine.exit(machine, now=now, code=int(json.get("code", 0)))
            case "fail":
                engine.fail(machine, now=now, message=json.get("message", "the machine broke"))
            case "remove":
                engine.remove(machine, now=now)
            case "rename":
                engine.rename(machine, name=json.get("name"))
            case "health":
                engine.doors.set_health(
                    machine.id,
                    status=json.get("status"),
                    open_=json.get("open"),
                    location=json.get("location", ""),
                )
            case other:
                return Answer(status=404, body={"error": f"nothing is called {other}"})
        return Answer(body=self._machine(machine, now))

    def _machine(self, machine: Machine, now: int) -> dict[str, Any]:
        billing = self._engine.scenario.billing
        bill = bill_usd(machine, billing=billing, now=now)
        return {
            "id": machine.id,
            "name": machine.name,
            "token": machine.token,
            "account_id": machine.account,
            "region": machine.region,
            "tier": machine.tier,
            "accelerator": machine.accelerator,
            "count": machine.count,
            "shape": machine.shape,
            "host": machine.host,
            "state": machine.state,
            "phantom": machine.phantom,
            "image": machine.image,
            "command": machine.command,
            "args": machine.args,
            "env_names": sorted(machine.env),
            "env_digests": machine.env,
            "ports": machine.ports,
            "requests": self._engine.doors.requests(machine.id),
            "created_at": as_text(machine.created_at),
            "ended_at": as_text(machine.ended_at),
            "end_reason": machine.end_reason,
            "exit_code": machine.exit_code,
            "terminates": machine.terminates,
            "restarts": machine.restarts,
            "stops": machine.stops,
            "history": [{"state": state, "at": as_text(at)} for state, at in machine.history],
            "billed_s": str(billed_s(machine, billing=billing, now=now)),
            "bill_usd": None if bill is None else str(bill),
        }
