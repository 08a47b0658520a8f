"""The fake cloud: a plain HTTP JSON API over the engine, a process of its own.

=======  ================================  =====================================================
GET      /v1/about                         what kind of cloud this is (no credential needed)
GET      /v1/account                       ``account_id``
GET      /v1/offers                        ``items``
POST     /v1/machines                      201 created, 200 the same token again
GET      /v1/machines?region=&cursor=      ``account_id``, ``total``, ``items``, ``next``
GET      /v1/machines/{id}?region=         404 with code ``no_such_machine``
POST     /v1/machines/{id}/stop            202; ``grace_s``
POST     /v1/machines/{id}/restart         202; the workload once more, on the same machine
POST     /v1/machines/{id}/extend          202; ``for_s``: its limit, if it has one, is so far from now
DELETE   /v1/machines/{id}?region=         202
GET      /v1/bill?since=&until=            ``items``: machines that bill no more, each with what it cost
POST     /v1/machines/{id}/logs            ``follow``, ``previous``; a stream's ``port`` and ``ticket``
POST     /v1/machines/{id}/exec            ``command``, ``stdin``, ``terminal``; the same
POST     /v1/machines/{id}/attach          the same
POST     /v1/machines/{id}/connect         ``port`` of the workload; the same
GET      /v1/machines/{id}/usage           ``cpu_s``, ``memory_bytes``
GET      /v1/parts?region=                 ``account_id``, ``items``: keys, templates, logins, …
DELETE   /v1/parts/{id}                    202; 404 ``no_such_part``, 409 ``in_use``
=======  ================================  =====================================================

The last five only where machines run processes (``processes`` in the scenario); the streams are those of
`providers.simulation.streams`.

Errors are ``{"error": {"code", "message", "host"?}}``. Without processes the container is not run: it "ends"
by the scenario, or as its environment says, ``FAKE_EXIT_AFTER_S`` seconds after it runs with code
``FAKE_EXIT_CODE``, and once it is asked to stop, ``FAKE_STOP_AFTER_S`` seconds later with ``FAKE_STOP_CODE``.
"""

import base64
import contextlib
import hashlib
import math
import sys
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from providers.base import Tier
from providers.simulation import command
from providers.simulation.clock import as_text, from_datetime
from providers.simulation.engine import Engine
from providers.simulation.http import Answer, Asked, Front
from providers.simulation.meter import bill_usd
from providers.simulation.orders import Order, Refusal, Refused
from providers.simulation.processes import CannotStart, Processes
from providers.simulation.scenario import Billing, Images
from providers.simulation.sockets import LOOPBACK
from providers.simulation.state import Machine
from providers.simulation.streams import Serve, Wire, serve_attached, serve_output, serve_port, serve_process

DEFAULT_SCENARIO = """\
cloud: fake
regions: [fake-1]
offers:
- {accelerator: H100, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "2.10", OnDemand: "4.20"}}
- {accelerator: A100, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "0.90", OnDemand: "1.80"}}
- {accelerator: A100-80GB, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "1.10", OnDemand: "2.20"}}
- {accelerator: L40S, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "0.60", OnDemand: "1.20"}}
- {accelerator: L4, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "0.25", OnDemand: "0.50"}}
- {accelerator: T4, counts: [1, 2, 4, 8], usd_per_hour: {Spot: "0.15", OnDemand: "0.35"}}
- {usd_per_hour: {Spot: "0.04", OnDemand: "0.10"}}
"""

_STATUS = {
    Refusal.CAPACITY: (409, "sold_out"),
    Refusal.QUOTA: (403, "quota_exceeded"),
    Refusal.AUTH: (401, "bad_credential"),
    Refusal.UNSUPPORTED: (422, "not_offered"),
    Refusal.INVALID: (422, "invalid_request"),
    Refusal.PRICE: (409, "price_too_high"),
    Refusal.TOKEN: (409, "token_reused"),
    Refusal.UNKNOWN_REGION: (404, "no_such_region"),
    Refusal.NO_SUCH_MACHINE: (404, "no_such_machine"),
    Refusal.NO_OUTPUT: (404, "no_output"),
    Refusal.NOT_RUNNING: (409, "not_running"),
    Refusal.NO_SUCH_PART: (404, "no_such_part"),
    Refusal.IN_USE: (409, "in_use"),
}


def run(scenario: Path | None, state: Path, port: int, host: str = LOOPBACK) -> None:
    """Serve until SIGTERM. Raises what `providers.simulation.command.run` does."""
    command.run(routes, default=DEFAULT_SCENARIO, scenario_file=scenario, state=state, port=port, host=host)


def routes(engine: Engine) -> list[BaseRoute]:
    front, api = Front(engine, _Shape()), _Api(engine)
    return [
        front.route("GET", "/v1/about", "about", api.about, needs_credential=False),
        front.route("GET", "/v1/account", "account", api.account),
        front.route("GET", "/v1/offers", "offers", api.offers),
        front.route("POST", "/v1/machines", "create", api.create),
        front.route("GET", "/v1/machines", "list", api.list),
        front.route("GET", "/v1/machines/{id}", "get", api.get),
        front.route("POST", "/v1/machines/{id}/stop", "stop", api.stop),
        front.route("POST", "/v1/machines/{id}/restart", "restart", api.restart),
        front.route("POST", "/v1/machines/{id}/extend", "extend", api.extend),
        front.route("DELETE", "/v1/machines/{id}", "terminate", api.terminate),
        front.route("GET", "/v1/bill", "bill", api.bill),
        front.route("POST", "/v1/machines/{id}/logs", "logs", api.logs),
        front.route("POST", "/v1/machines/{id}/exec", "exec", api.exec),
        front.route("POST", "/v1/machines/{id}/attach", "attach", api.attach),
        front.route("POST", "/v1/machines/{id}/connect", "connect", api.connect),
        front.route("GET", "/v1/machines/{id}/usage", "usage", api.usage),
        front.route("GET", "/v1/parts", "parts", api.parts),
        front.route("DELETE", "/v1/parts/{id}", "drop_part", api.drop_part),
    ]


class _Shape:
    def about(self, asked: Request, json: Any) -> tuple[str, str]:
        body = json if isinstance(json, dict) else {}
        return str(asked.query_params.get("region") or body.get("region") or ""), str(body.get("name") or "")

    def refused(self, error: Refused) -> Answer:
        status, code = _STATUS[error.reason]
        detail = {"code": code, "message": error.message}
        return Answer(status=status, body={"error": detail | ({"host": error.host} if error.host else {})})

    def error_body(self, message: str) -> Answer:
        return Answer(body={"error": {"code": "internal", "message": message}})

    def throttled(self, retry_after_s: float | None) -> Answer:
        headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
        return Answer(
            status=429, body={"error": {"code": "throttled", "message": "too many calls"}}, headers=headers
        )


class _Api:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def about(self, _asked: Asked) -> Answer:
        facts, life = self._engine.scenario, self._engine.life
        settle_s = facts.lag.list_create_s + 10 if facts.settle_after_s is None else facts.settle_after_s
        return Answer(
            body={
                "cloud": facts.cloud,
                "tiers": sorted(facts.tiers),
                "regions": list(facts.regions),
                "lists_by_region": facts.lists_by_region,
                "idempotent_for_s": facts.idempotent_for_s,
                "settle_after_s": settle_s,
                "list_every_s": facts.list_every_s,
                "calls_per_s": facts.calls_per_s,
                "completion": facts.completion,
                "restarts": facts.restarts,
                "processes": facts.processes is not None,
                "dead_man": facts.dead_man,
                "boot_s": life.queue_s + life.boot_s,
                "max_lifetime_s": life.max_s,
                "ended_listed_s": None if life.exited_s is None else life.exited_s + facts.history_s,
                "bills_from": "accepted" if facts.billing.states & {"queued", "booting"} else "started",
                "bills_until": _bills_until(facts.billing),
                "bill_step_s": math.ceil(facts.billing.unit_s),
                "bill_minimum_s": math.ceil(facts.billing.minimum_s),
                "bill_reclaim_free_s": math.ceil(facts.billing.reclaim_free_s),
                "needs_accelerator": all(offer.accelerator for offer in facts.offers),
            }
        )

    def account(self, asked: Asked) -> Answer:
        return Answer(body={"account_id": self._account(asked)})

    def offers(self, _asked: Asked) -> Answer:
        items = [
            {
                "region": region,
                "tier": tier,
                "accelerator": offer.accelerator,
                "count": count,
                "shape": f"{offer.accelerator.lower() if offer.accelerator else 'cpu'}x{count}",
                "meters": _meters(meters),
            }
            for region, tier, offer, count, meters in self._engine.market.offers()
        ]
        return Answer(body={"items": items})

    def create(self, asked: Asked) -> Answer:
        order = _order(asked, self._engine.scenario.images)
        phantom = asked.fault("phantom") is not None
        made = self._engine.create(order, now=asked.now, phantom=phantom)
        status = 200 if made.replayed else 201
        reserved = phantom or made.machine.state != "queued"
        shown = self._machine(made.machine, asked.now)
        return Answer(status=status, body=shown | {"account_id": self._account(asked), "reserved": reserved})

    def list(self, asked: Asked) -> Answer:
        engine = self._engine
        region = self._region(asked)
        machines = engine.listed(now=asked.now, region=region, account=self._account(asked))
        if hide := asked.fault("hide"):
            oldest = math.inf if hide.age_s is None else hide.age_s * 1e6
            machines = [machine for machine in machines if asked.now - machine.created_at >= oldest]
        total = len(machines)
        if cut := asked.fault("truncate") or asked.fault("shrink"):
            machines = machines[: cut.keep]
            total = len(machines) if cut.kind == "shrink" else max(total, cut.keep + 1)
        after = _after(asked)
        size = min(int(asked.query.get("limit", engine.scenario.page_size)), engine.scenario.page_size)
        rest = [machine for machine in machines if machine.number > after]
        page = rest[:size]
        more = len(rest) > size
        if asked.fault("repeat_page"):
            more, cursor = True, after
        else:
            cursor = page[-1].number if page else after
        body: dict[str, Any] = {
            "items": [self._machine(machine, asked.now, listed=True) for machine in page],
            "next": _cursor(cursor) if more else None,
        }
        if not asked.fault("missing_total"):
            body |= {"account_id": self._account(asked), "total": total}
        return Answer(body=body)

    def get(self, asked: Asked) -> Answer:
        machine = self._engine.get(asked.path["id"], now=asked.now, region=self._region(asked))
        if machine is None or asked.fault("hide") or machine.account != self._account(asked):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        return Answer(body=self._machine(machine, asked.now))

    def stop(self, asked: Asked) -> Answer:
        grace_s = float((asked.json or {}).get("grace_s", 0))
        if not self._engine.stop(
            asked.path["id"], now=asked.now, grace_s=grace_s, region=self._region(asked)
        ):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        return Answer(status=202, body={})

    def restart(self, asked: Asked) -> Answer:
        if not self._engine.restart(asked.path["id"], now=asked.now, region=self._region(asked)):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        return Answer(status=202, body={})

    def extend(self, asked: Asked) -> Answer:
        for_s = (asked.json or {}).get("for_s")
        if not isinstance(for_s, int | float) or for_s <= 0:
            raise Refused(Refusal.INVALID, "for_s must be above zero")
        if not self._engine.extend(asked.path["id"], now=asked.now, for_s=for_s, region=self._region(asked)):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        return Answer(status=202, body={})

    def terminate(self, asked: Asked) -> Answer:
        if asked.fault("ignored") and self._engine.get(asked.path["id"], now=asked.now) is not None:
            return Answer(status=202, body={})
        if not self._engine.terminate(asked.path["id"], now=asked.now, region=self._region(asked)):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        return Answer(status=202, body={})

    def logs(self, asked: Asked) -> Answer:
        processes, machine = self._running(asked)
        options = asked.json or {}
        run_back = 1 if options.get("previous") else 0
        if processes.runs_of(machine.id) <= run_back:
            raise Refused(Refusal.NO_OUTPUT, "there is no output")
        follow = bool(options.get("follow"))

        async def serve(wire: Wire) -> None:
            await serve_output(wire, processes, machine.id, follow=follow, run_back=run_back)

        return self._stream(asked, serve)

    def exec(self, asked: Asked) -> Answer:
        processes, machine = self._running(asked)
        options = asked.json or {}
        command = [str(word) for word in options.get("command") or ()]
        if not command or not command[0]:
            raise Refused(Refusal.INVALID, "command must not be empty")
        if machine.state != "running":
            raise Refused(Refusal.NOT_RUNNING, "the machine does not run")
        stdin, terminal = bool(options.get("stdin")), bool(options.get("terminal"))

        async def serve(wire: Wire) -> None:  # started by the client's coming: a lost answer starts nothing
            with contextlib.suppress(CannotStart):  # the stream ends without an end
                await serve_process(
                    wire, processes.start(machine.id, command, stdin=stdin, terminal=terminal)
                )

        return self._stream(asked, serve)

    def attach(self, asked: Asked) -> Answer:
        processes, machine = self._running(asked)
        if machine.state != "running":
            raise Refused(Refusal.NOT_RUNNING, "the machine does not run")
        stdin = bool((asked.json or {}).get("stdin"))

        async def serve(wire: Wire) -> None:
            await serve_attached(wire, processes, machine.id, stdin=stdin)

        return self._stream(asked, serve)

    def connect(self, asked: Asked) -> Answer:
        processes, machine = self._running(asked)
        if machine.state != "running":
            raise Refused(Refusal.NOT_RUNNING, "the machine does not run")
        port = processes.port(machine.id, int((asked.json or {}).get("port") or 0))

        async def serve(wire: Wire) -> None:
            await serve_port(wire, port)

        return self._stream(asked, serve)

    def usage(self, asked: Asked) -> Answer:
        processes, machine = self._running(asked)
        return Answer(body={"at": as_text(asked.now)} | (processes.usage(machine.id) or {}))

    def _stream(self, asked: Asked, serve: Serve) -> Answer:
        return Answer(body=self._engine.streams.ticket(serve, asked.faults))

    def _running(self, asked: Asked) -> tuple[Processes, Machine]:
        """The machine and the processes, where there are any."""
        machine = self._engine.get(asked.path["id"], now=asked.now, region=self._region(asked))
        processes = self._engine.processes
        if machine is None or machine.account != self._account(asked):
            raise Refused(Refusal.NO_SUCH_MACHINE, "there is no such machine")
        if processes is None or not processes.known(machine.id):
            raise Refused(Refusal.NO_OUTPUT, "this machine runs no process")
        return processes, machine

    def bill(self, asked: Asked) -> Answer:
        """What each machine that went in the window has cost; null: at a price that is not told."""
        since, until = (_moment(asked.query.get(name)) for name in ("since", "until"))
        billing, items = self._engine.scenario.billing, []
        for machine in self._engine.machines.values():
            gone = machine.since("gone")
            if gone is None or machine.phantom or machine.account != self._account(asked):
                continue
            if not since <= gone < until:
                continue
            usd = bill_usd(machine, billing=billing, now=asked.now)
            items.append(
                {
                    "id": machine.id,
                    "name": machine.name,
                    "start": as_text(machine.created_at),
                    "end": as_text(gone),
                    "usd": None if usd is None else str(usd),
                    "currency": "USD",
                }
            )
        return Answer(body={"account_id": self._account(asked), "items": items})

    def parts(self, asked: Asked) -> Answer:
        engine, account, region = self._engine, self._account(asked), self._region(asked)
        items = [
            {
                "id": thing.id,
                "kind": thing.kind,
                "name": thing.name,
                "region": thing.region,
                "created_at": as_text(thing.created_at),
                "in_use": engine.in_use(thing),
            }
            for thing in engine.things.values()
            if not thing.dropped and thing.account == account and region in (None, thing.region)
        ]
        return Answer(body={"account_id": account, "total": len(items), "items": items})

    def drop_part(self, asked: Asked) -> Answer:
        match self._engine.drop_thing(asked.path["id"]):
            case None:
                raise Refused(Refusal.NO_SUCH_PART, "there is no such part")
            case False:
                raise Refused(Refusal.IN_USE, "a machine uses it")
        return Answer(status=202, body={})

    def _region(self, asked: Asked) -> str | None:
        """The region a call is for; None where calls are not regional."""
        facts, region = self._engine.scenario, asked.query.get("region")
        if region is not None and region not in (facts.regions or ("",)):
            raise Refused(Refusal.UNKNOWN_REGION, f"there is no region {region!r}")
        if region is None and facts.lists_by_region:
            raise Refused(Refusal.INVALID, "region must be given")
        return region

    def _account(self, asked: Asked) -> str:
        own = self._engine.scenario.account
        return f"{own}-other" if asked.fault("foreign") else own

    def _machine(self, machine: Machine, now: int, *, listed: bool = False) -> dict[str, Any]:
        state = self._engine.shown_state(machine, now=now, listed=listed)
        completion = self._engine.scenario.completion
        end = None
        if machine.end_reason and state in ("exited", "ending", "gone") and completion != "never":
            end = {
                "reason": machine.end_reason,
                "message": machine.end_message,
                "at": as_text(machine.ended_at),
                "exit_code": machine.exit_code if completion == "code" else None,
                "image": bool(machine.pull_problem),
            }
        number = machine.number % 65_025
        ports: dict[int, str] = {}
        if state == "running":
            processes = self._engine.processes
            ports = processes.addresses(machine.id) if processes else self._engine.doors.addresses(machine)
        address = f"198.18.{number // 255}.{number % 255 + 1}"
        return {
            "id": machine.id,
            "name": machine.name,
            "region": machine.region,
            "tier": machine.tier,
            "accelerator": machine.accelerator,
            "count": machine.count,
            "shape": machine.shape,
            "state": "running" if completion == "never" and state == "exited" else state,
            "created_at": as_text(machine.created_at),
            "started_at": as_text(machine.last("running")),
            "address": address if state == "running" else None,
            "ports": [{"port": port, "address": where} for port, where in ports.items()],
            "host": machine.host,
            "meters": _meters(machine.rates[-1][1]) if state in self._engine.scenario.billing.states else [],
            "end": end,
            "expires_at": as_text(machine.due.get("expire")),
        }


def _moment(text: str | None) -> int:
    try:
        return from_datetime(datetime.fromisoformat(text or ""))
    except (ValueError, TypeError):
        raise Refused(Refusal.INVALID, "since and until must be moments with a zone") from None


def _bills_until(billing: Billing) -> str:
    if "ending" in billing.states:
        return "gone"
    return "terminate_asked" if "exited" in billing.states else "ended"


def digest_of(value: str) -> str:
    """What is kept of a variable's value: enough to tell whether it arrived."""
    return hashlib.sha256(value.encode()).hexdigest()


def _pull_problem(body: dict[str, Any], images: Images) -> str:
    """Why the image could not be pulled; the login is looked at here, and kept nowhere."""
    image = str(body.get("image") or "")
    if image in images.missing:
        return f"pull of {image} failed: not found"
    wanted = images.private.get(image.partition("/")[0])
    login = body.get("registry") or {}
    if wanted is not None and f"{login.get('username')}:{login.get('password')}" != wanted:
        return f"pull of {image} failed: {'access denied' if login else 'authentication required'}"
    return ""


def _order(asked: Asked, images: Images) -> Order:
    body = asked.json
    if not isinstance(body, dict):
        raise Refused(Refusal.INVALID, "the body must be a JSON object")
    env = body.get("env") or {}
    try:
        ceiling = body.get("max_usd_per_hour")
        return Order(
            name=body["name"],
            region=body.get("region") or "",
            tier=Tier(body["tier"]),
            accelerator=body.get("accelerator"),
            count=int(body.get("count", 1)),
            token=body.get("token"),
            image=body.get("image", ""),
            command=tuple(body.get("command") or ()),
            args=tuple(body.get("args") or ()),
            stdin=bool(body.get("stdin")),
            stdin_once=bool(body.get("stdin_once")),
            terminal=bool(body.get("terminal")),
            env={name: digest_of(value) for name, value in env.items()},
            values=dict(env),
            ports=tuple(int(port) for port in body.get("ports") or ()),
            pull_problem=_pull_problem(body, images),
            disk_gib=body.get("disk_gib"),
            ceiling_usd_per_hour=None if ceiling is None else Decimal(ceiling),
            avoid_hosts=frozenset(body.get("avoid_hosts") or ()),
            expires_after_s=body.get("expires_after_s"),
            exit_after_s=_number(env, "FAKE_EXIT_AFTER_S"),
            exit_code=_whole(env, "FAKE_EXIT_CODE"),
            stop_after_s=_number(env, "FAKE_STOP_AFTER_S"),
            stop_code=_whole(env, "FAKE_STOP_CODE"),
            digest=hashlib.sha256(asked.body).hexdigest(),
        )
    except (KeyError, ValueError, TypeError, InvalidOperation) as error:
        raise Refused(Refusal.INVALID, f"the order cannot be read: {error}") from error


def _number(env: dict[str, str], name: str) -> float | None:
    return None if env.get(name) in (None, "") else float(env[name])


def _whole(env: dict[str, str], name: str) -> int | None:
    return None if (number := _number(env, name)) is None else int(number)


def _meters(meters: list[tuple[str, str, str | None]]) -> list[dict[str, str | None]]:
    return [{"kind": kind, "quantity": quantity, "usd": usd} for kind, quantity, usd in meters]


def _cursor(number: int) -> str:
    return base64.urlsafe_b64encode(f"after:{number}".encode()).decode()


def _after(asked: Asked) -> int:
    cursor = asked.query.get("cursor")
    if not cursor:
        return 0
    try:
        return int(base64.urlsafe_b64decode(cursor).decode().removeprefix("after:"))
    except ValueError as error:
        raise Refused(Refusal.INVALID, "the cursor is not one of ours") from error


if __name__ == "__main__":
    sys.exit(command.main(run))
