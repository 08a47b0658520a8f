"""A simulated RunPod: REST v2, and what is left of GraphQL, over the engine. A process of its own.

=======  ==============================  =================================================================
GET      /v2/pods?limit=&cursor=         newest first; other parameters are ignored
POST     /v2/pods                        201; names may repeat, and nothing makes a create idempotent
GET      /v2/pods/{id}
PATCH    /v2/pods/{id}                   the name
DELETE   /v2/pods/{id}                   204
POST     /v2/pods/{id}/action            start, stop, restart, terminate
GET      /v2/pods/{id}/logs              server-sent events that never end
GET      /v2/catalog/gpus, /datacenters
\\*        /v2/templates, /v2/registries
GET      /v2/billing/pods                by the hour, an hour late
POST     /graphql                        ``pod{lastStatusChange}``, ``myself{clientBalance …}``
\\*        /v1/…                           410
=======  ==============================  =================================================================

In a scenario ``regions`` are data centres, and prices are by ``SECURE`` and ``COMMUNITY``. An accelerator is
known by RunPod's own id of it where the catalogue has one. The container is not run: it "ends" as the
scenario says, or ``SIM_EXIT_AFTER_S`` seconds after its start with code ``SIM_EXIT_CODE`` where its
environment has them, and is started again, as RunPod does. ``quirks`` holds the switches of `Quirks`. The
value of a variable is shown as it came while the process lives; on disk are only those of our own names.
"""

import base64
import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from providers.base import Tier
from providers.runpod.simulator_books import WORDS, Books, account_of, id_of, number_of
from providers.runpod.simulator_logs import Logs
from providers.runpod.simulator_rules import (
    BODY_BYTES_MAX,
    LOW_BALANCE,
    NO_DISK,
    NO_INSTANCES,
    Quirks,
    Wrong,
    check_create,
    problem,
    quirks_of,
)
from providers.runpod.simulator_ssh import SSH_PORT, Servers
from providers.simulation import command, control
from providers.simulation.clock import MICROS_PER_S, as_text, micros
from providers.simulation.engine import Engine
from providers.simulation.http import Answer, Asked, Front
from providers.simulation.orders import Order, Refusal, Refused
from providers.simulation.state import Machine

DEFAULT_SCENARIO = """\
cloud: runpod
account: runpod-simulated
regions: [US-CA-2, US-TX-3, EU-RO-1, EU-SE-1]
lists: global
disk_usd_per_gib_hour: "0.000136986301369863"
life: {queue_s: 2, boot_s: 8, exit_restarts: true}
billing: {states: [queued, booting, running]}
offers:
- {accelerator: H100, counts: [1, 2, 4, 8], usd_per_hour: {SECURE: "3.29", COMMUNITY: "2.69"}}
- {accelerator: A100-80GB, counts: [1, 2, 4, 8], usd_per_hour: {SECURE: "1.59", COMMUNITY: "1.39"}}
- {accelerator: L40S, counts: [1, 2, 4], usd_per_hour: {SECURE: "0.99", COMMUNITY: "0.79"}}
- {accelerator: RTX4090, counts: [1, 2, 4], usd_per_hour: {SECURE: "0.74", COMMUNITY: "0.34"}}
- {accelerator: A40, counts: [1, 2, 4, 8], usd_per_hour: {SECURE: "0.44"}}
"""

_CLOUDS = {word: tier for tier, word in WORDS.items()}
_MINUTE_S = 60
_NO_ADDRESS = "100.65.0.1"  # of the row that nobody asked for; it is not reached from outside
_REFUSALS = {
    Refusal.CAPACITY: (400, NO_INSTANCES),
    Refusal.QUOTA: (402, LOW_BALANCE),
    Refusal.AUTH: (401, "invalid API key"),
    Refusal.UNSUPPORTED: (403, "you do not have access to this GPU pool"),
    Refusal.NO_SUCH_MACHINE: (404, "pod not found"),
}
_ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
}
Handler = Callable[[Asked], Answer]


def run(scenario: Path | None, state: Path, port: int) -> None:
    """Serve until SIGTERM. Raises what `providers.simulation.command.run` does."""
    command.run(routes, default=DEFAULT_SCENARIO, scenario_file=scenario, state=state, port=port)


def routes(engine: Engine) -> list[BaseRoute]:
    quirks = quirks_of(engine.scenario.quirks)
    books = Books(engine, quirks)
    api = _Api(engine, quirks, books)
    front = Front(engine, _Shape())

    def at(method: str, path: str, verb: str, handler: Handler, *, writes: bool = False) -> BaseRoute:
        return front.route(method, path, verb, api.guarded(handler, writes=writes), needs_credential=False)

    return [
        at("GET", "/v2/pods", "list", api.list),
        at("POST", "/v2/pods", "create", api.create, writes=True),
        at("GET", "/v2/pods/{id}", "get", api.get),
        at("PATCH", "/v2/pods/{id}", "patch", api.patch, writes=True),
        at("DELETE", "/v2/pods/{id}", "terminate", api.terminate, writes=True),
        at("POST", "/v2/pods/{id}/action", "action", api.action, writes=True),
        at("GET", "/v2/pods/{id}/logs", "logs", api.logs),
        at("GET", "/v2/catalog/gpus", "offers", books.gpus),
        at("GET", "/v2/catalog/datacenters", "datacenters", books.datacenters),
        at("GET", "/v2/templates", "account", books.templates),
        at("POST", "/v2/templates", "account", books.make_template, writes=True),
        at("DELETE", "/v2/templates/{id}", "parts", books.drop_template, writes=True),
        at("GET", "/v2/registries", "registries", books.registries),
        at("POST", "/v2/registries", "registries", books.make_registry, writes=True),
        at("DELETE", "/v2/registries/{id}", "parts", books.drop_registry, writes=True),
        at("GET", "/v2/billing/pods", "bill", books.bill),
        at("POST", "/graphql", "graphql", books.graphql),
        *(at(method, "/v1/{rest:path}", "v1", books.v1) for method in ("GET", "POST", "DELETE")),
        control.route(engine, "POST", "/sim/machines/{id}/say", api.say),
    ]


class _Shape:
    def about(self, asked: Request, json: Any) -> tuple[str, str]:
        body = json if isinstance(json, dict) else {}
        return "", str(body.get("name") or "")

    def refused(self, error: Refused) -> Answer:
        if error.reason is Refusal.INVALID:
            return problem(422, "Request validation failed.", (error.message,))
        status, text = _REFUSALS.get(error.reason, (422, error.message))
        return problem(status, text)

    def error_body(self, message: str) -> Answer:
        return Answer(body={"title": "Internal Server Error", "status": 500, "detail": message})

    def throttled(self, retry_after_s: float | None) -> Answer:
        headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
        return problem(429, "rate limit exceeded for the minute window", headers=headers)


class _Api:
    def __init__(self, engine: Engine, quirks: Quirks, books: Books) -> None:
        self._engine, self._quirks, self._books = engine, quirks, books
        self._env: dict[str, dict[str, str]] = {}
        self._window, self._calls = 0, 0
        engine.id_of = lambda number: id_of(f"{engine.scenario.account}/{number}")
        self._ssh = Servers(engine) if quirks.sshd else None
        self._logs = Logs(engine, problem_of=self._pull_problem, forgets_s=self._quirks.forgets_logs_s)

    def guarded(self, handler: Handler, *, writes: bool) -> Handler:
        """What comes before any route: edge, size, key, rate and rights."""

        def guard(asked: Asked) -> Answer:
            quirks = self._quirks
            headers: dict[str, str] = {}
            if asked.headers.get("user-agent", "").lower().startswith("python-urllib"):
                return Answer(status=403, body=b"error code: 1010", media_type="text/plain")
            if len(asked.body) > BODY_BYTES_MAX:
                return problem(413, f"the body has more than {BODY_BYTES_MAX} bytes")
            given, credential = asked.headers.get("authorization", ""), self._engine.scenario.credential
            if credential and given != f"Bearer {credential}":
                return problem(401, "invalid API key" if given else "missing bearer token")
            if quirks.per_minute is not None:
                left_s, headers = self._count(asked.now, quirks.per_minute)
                if self._calls > quirks.per_minute:
                    headers |= {"Retry-After": str(left_s)}
                    return problem(429, "rate limit exceeded for the minute window", headers=headers)
            if quirks.suspended:
                return problem(403, "access denied: the account is suspended", headers=headers)
            if writes and quirks.read_only_key:
                return problem(403, "access denied", headers=headers)
            self._books.collect(asked.now)
            try:
                answer = handler(asked)
            except Wrong as wrong:
                answer = wrong.answer
            except Refused as refused:
                answer = _Shape().refused(refused)
            return Answer(
                status=answer.status,
                body=answer.body,
                headers={**headers, **answer.headers},
                media_type=answer.media_type,
                stream=answer.stream,
            )

        return guard

    # --- pods ---

    def create(self, asked: Asked) -> Answer:
        body = check_create(asked.json)
        gpu, env = body.get("gpu") or {}, body.get("env") or {}
        if body.get("gpu") is None:
            raise Wrong(400, NO_INSTANCES)  # machines without a card are not simulated
        accelerator = self._books.ids.get(gpu["id"])
        if accelerator is None:
            raise Wrong(400, f'invalid GPU type id "{gpu["id"]}"')
        if accelerator in self._quirks.closed_pools:
            raise Refused(Refusal.UNSUPPORTED, "closed")
        order = Order(
            name=body["name"],
            region="",
            tier=_CLOUDS[body.get("cloud", "SECURE")],
            accelerator=accelerator,
            count=gpu.get("count", 0),
            image=body["image"],
            command=tuple(body.get("entrypoint") or ()),
            args=tuple(body.get("cmd") or ()),
            env={name: hashlib.sha256(value.encode()).hexdigest() for name, value in env.items()},
            ports=tuple(int(port.partition("/")[0]) for port in body.get("ports") or ()),
            labels={name: value for name, value in env.items() if name.startswith("NEBULA_")}
            | {"ports": " ".join(body.get("ports") or ()), "registry": body.get("registry") or ""}
            | {"disk": str(body.get("disk", 0)), "stays": env.get("NEBULA_JOB", "")},
            disk_gib=body.get("disk"),
            values=env,
            exit_after_s=_number(env, "SIM_EXIT_AFTER_S"),
            exit_code=None if (code := _number(env, "SIM_EXIT_CODE")) is None else int(code),
        )
        self._books.check_credit(order, asked.now)
        if "disk" not in body:
            raise Wrong(400, NO_DISK)
        machine = self._place(order, body.get("dataCenterIds") or [], asked)
        self._env[machine.id] = dict(env)
        return Answer(status=201, body=self._pod(machine, asked.now, listed=False))

    def _place(self, order: Order, wanted: list[str], asked: Asked) -> Machine:
        """In one of the data centres that were asked for; where none of them is known, anywhere."""
        engine, known = self._engine, self._engine.scenario.regions or ("",)
        regions = [region for region in wanted if region in known] or list(known)
        if self._quirks.elsewhere is not None:
            regions = [self._quirks.elsewhere]
        refused: Refused | None = None
        for region in regions:
            placed = replace(order, region=region)
            try:
                return engine.create(
                    placed, now=asked.now, phantom=asked.fault("phantom") is not None
                ).machine
            except Refused as error:
                if error.reason not in (Refusal.CAPACITY, Refusal.UNSUPPORTED):
                    raise
                refused = error
        assert refused is not None
        raise Wrong(400, NO_INSTANCES)  # a count that no host has reads the same as none being left

    def list(self, asked: Asked) -> Answer:
        engine, account = self._engine, account_of(self._engine, asked)
        size, below = self._page(asked)
        shown = [
            machine
            for machine in engine.listed(now=asked.now, account=account)
            if engine.shown_state(machine, now=asked.now, listed=True) != "gone"
        ]
        if hide := asked.fault("hide"):
            oldest = 0 if hide.age_s is None else micros(hide.age_s)
            shown = [each for each in shown if oldest and asked.now - each.created_at >= oldest]
        cut = asked.fault("truncate") or asked.fault("shrink")
        shown = sorted(shown, key=lambda each: -each.number)
        rest = [each for each in shown if below is None or each.number < below]
        page = rest[: cut.keep if cut else size]
        more = len(rest) > len(page) if cut is None else cut.kind == "truncate"
        last = page[-1].number if page else 0
        if asked.fault("repeat_page"):
            more, last = True, below or 2**60
        body: dict[str, Any] = {"pods": [self._pod(each, asked.now, listed=True) for each in page]}
        cursor = _cursor(account, last) if more and not (cut and cut.kind == "truncate") else None
        if not asked.fault("missing_total"):
            body["pagination"] = {"nextCursor": cursor, "hasNextPage": more}
        return Answer(body=body)

    def get(self, asked: Asked) -> Answer:
        return Answer(body=self._pod(self._found(asked), asked.now, listed=False))

    def patch(self, asked: Asked) -> Answer:
        machine, body = self._found(asked), asked.json or {}
        if set(body) - {"name"}:
            raise Wrong(422, "Request validation failed.", ("$: only the name can be changed here",))
        self._engine.rename(machine, name=str(body["name"]))
        return Answer(body=self._pod(machine, asked.now, listed=False))

    def terminate(self, asked: Asked) -> Answer:
        self._engine.terminate(self._found(asked).id, now=asked.now)
        return Answer(status=204)

    def action(self, asked: Asked) -> Answer:
        machine, wanted = self._found(asked), (asked.json or {}).get("action")
        if wanted not in ("start", "stop", "restart", "terminate"):
            raise Wrong(422, "Request validation failed.", ("$.action: unknown",))
        if wanted not in _ACTIONS.get(self._status(machine, asked.now, listed=False), []):
            raise Wrong(409, f"action {wanted} is not valid for the pod's status")
        if wanted == "terminate":
            return self.terminate(asked)
        if wanted == "stop":
            self._engine.stop(machine.id, now=asked.now, grace_s=0)
        elif wanted == "start" and self._quirks.start_fails:
            raise Wrong(400, "There are not enough free GPUs on the host machine to start this pod.")
        else:
            self._engine.restart(machine.id, now=asked.now)
        return Answer(body=self._pod(machine, asked.now, listed=False))

    def logs(self, asked: Asked) -> Answer:
        stream = self._logs.stream(self._found(asked), asked.query, asked.headers.get("last-event-id"))
        return Answer(stream=stream, media_type="text/event-stream")

    def say(self, request: Request, json: Any) -> Answer:
        """Let the container (or with ``source`` system, the host) write a line."""
        machine = self._engine.machines[request.path_params["id"]]
        self._logs.say(machine, str(json["line"]), source=str(json.get("source", "container")))
        return Answer(body={})

    # --- inside ---

    def _found(self, asked: Asked) -> Machine:
        machine = self._engine.get(asked.path["id"], now=asked.now)
        if machine is None or asked.fault("hide") or machine.account != account_of(self._engine, asked):
            raise Wrong(404, "pod not found")
        return machine

    def _page(self, asked: Asked) -> tuple[int, int | None]:
        limit = asked.query.get("limit", "1000")
        if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
            raise Wrong(422, "Request validation failed.", ("limit: must be 1 to 1000",))
        cursor, below = asked.query.get("cursor"), None
        if cursor:
            below = _below(account_of(self._engine, asked), cursor)
            if below is None:
                raise Wrong(422, "Request validation failed.", ("cursor: is not valid",))
        return min(int(limit), self._engine.scenario.page_size), below

    def _status(self, machine: Machine, now: int, *, listed: bool) -> str:
        state = self._engine.shown_state(machine, now=now, listed=listed)
        if state == "running" and self._pull_problem(machine, now):
            state = "booting"
        observed = self._quirks.lifecycle == "observed"
        match state:
            case "queued" | "booting" if observed:
                return "RUNNING"
            case "queued":
                return "PROVISIONING"
            case "booting":
                return "STARTING"
            case "running":
                return "RUNNING"
            case "gone":
                return "TERMINATED"
            case _:
                return "ERROR" if machine.end_reason == "failed" and state == "exited" else "EXITED"

    def _pod(self, machine: Machine, now: int, *, listed: bool) -> dict[str, Any]:
        status = self._status(machine, now, listed=listed)
        runs = (
            status == "RUNNING"
            and self._engine.shown_state(machine, now=now, listed=listed) == "running"
            and not self._pull_problem(machine, now)
        )
        env = dict.fromkeys(machine.env, "") | machine.labels | self._env.get(machine.id, {})
        for label in ("ports", "registry", "disk", "stays"):
            env.pop(label, None)
        exited = status in ("EXITED", "ERROR", "TERMINATED")
        cost = Decimal(0) if exited and not self._quirks.exited_cost else self._books.cost(machine)
        return {
            "id": machine.id,
            "name": machine.name or "",
            "status": status,
            "actions": _ACTIONS.get(status, []),
            "image": machine.image,
            "entrypoint": machine.command,
            "cmd": machine.args,
            "disk": int(machine.labels.get("disk") or 0),
            "env": env,
            "ports": machine.labels.get("ports", "").split(),
            "registry": machine.labels.get("registry") or None,
            "gpu": self._card(machine),
            "cloud": WORDS[Tier(machine.tier)],
            "dataCenterId": machine.region or None,
            "cost": number_of(cost),
            "locked": False,
            "template": None,
            "ssh": {"proxy": None, "direct": self._direct(machine, now) if runs else None},
            "runtime": self._runtime(machine, now) if runs else None,
            "createdAt": _zulu(machine.created_at),
            "startedAt": _zulu(machine.last("running")),
        }

    def _card(self, machine: Machine) -> dict[str, Any] | None:
        if machine.accelerator is None:
            return None
        own = next(
            (own for own, name in self._books.ids.items() if name == machine.accelerator), machine.accelerator
        )
        return {"id": own, "count": machine.count}

    def _runtime(self, machine: Machine, now: int) -> dict[str, Any]:
        since = machine.last("running") or now
        mapped = self._mapped(machine, now)
        doors = self._doors(machine)
        rows: list[dict[str, Any]] = [{"private": 19123, "public": 60000, "type": "http", "ip": _NO_ADDRESS}]
        for text in machine.labels.get("ports", "").split():
            port, _, kind = text.partition("/")
            if kind == "tcp":
                ip, number = _address(machine, int(port), doors.get(int(port)))
                rows.append(
                    {
                        "private": int(port),
                        "public": number if mapped else None,
                        "type": "tcp",
                        "ip": ip if mapped else None,
                    }
                )
        return {"uptime": (now - since) / MICROS_PER_S, "gpus": [], "ports": rows}

    def _mapped(self, machine: Machine, now: int) -> bool:
        return now - (machine.last("running") or now) >= micros(self._quirks.ports_after_s)

    def _doors(self, machine: Machine) -> dict[int, str]:
        """Where its ports really are, those that are somewhere."""
        processes = self._engine.processes
        found = self._engine.doors.addresses(machine)
        found |= processes.addresses(machine.id) if processes is not None else {}
        if self._ssh is not None and SSH_PORT in machine.ports:
            key = self._env.get(machine.id, {}).get("PUBLIC_KEY", "")
            found |= self._ssh.address(machine, key=key)
        return found

    def _direct(self, machine: Machine, now: int) -> dict[str, Any] | None:
        address = self._doors(machine).get(SSH_PORT)
        if self._ssh is None or address is None or not self._mapped(machine, now):
            return None
        if not self._quirks.ssh_told:
            return None
        host, _, port = address.partition(":")
        command = f"ssh root@{host} -p {port}"
        return {"host": host, "port": int(port), "username": "root", "command": command}

    def _pull_problem(self, machine: Machine, now: int) -> str:
        """What the host says of its image; looked at each time, since a new login works after a while."""
        images = self._engine.scenario.images
        if machine.image in images.missing:
            return f"error pulling image: {machine.image}: manifest unknown"
        wanted = images.private.get(machine.image.partition("/")[0])
        if wanted is None:
            return ""
        login = self._books.kept("registries").get(machine.labels.get("registry", ""))
        if login is None or login["login"] != hashlib.sha256(wanted.encode()).hexdigest():
            return f"error pulling image: pull access denied for {machine.image}"
        if now < login["at"] + micros(self._quirks.registry_delay_s):
            return "error pulling image: access forbidden"
        return ""

    def _count(self, now: int, most: int) -> tuple[int, dict[str, str]]:
        """Count a call in its minute; the seconds left of it, and the headers that tell so."""
        seconds = now // MICROS_PER_S
        if seconds // _MINUTE_S != self._window:
            self._window, self._calls = seconds // _MINUTE_S, 0
        self._calls += 1
        left_s = int(_MINUTE_S - seconds % _MINUTE_S)
        left = max(0, most - self._calls)
        return left_s, {
            "RateLimit": f'"minute";r={left};t={left_s}',
            "RateLimit-Policy": f'"minute";q={most};w={_MINUTE_S}',
        }


def _zulu(at: int | None) -> str | None:
    text = as_text(at)
    return text.replace("+00:00", "Z") if text else None


def _address(machine: Machine, port: int, door: str | None) -> tuple[str, int]:
    """Where a port is outside: a new one after each restart, as RunPod gives."""
    if door is not None:
        ip, _, number = door.partition(":")
        return ip, int(number)
    digest = hashlib.sha256(f"{machine.id}/{port}/{machine.restarts}".encode()).digest()
    return f"198.18.{digest[0]}.{digest[1] or 1}", 10_000 + int.from_bytes(digest[2:4], "big") % 50_000


def _number(env: dict[str, str], name: str) -> float | None:
    try:
        return float(env[name])
    except (KeyError, ValueError):
        return None


def _cursor(account: str, number: int) -> str:
    return base64.urlsafe_b64encode(f"{account}:{number}".encode()).decode()


def _below(account: str, cursor: str) -> int | None:
    """The number in a cursor of this account; None for any other text."""
    try:
        whose, _, number = base64.urlsafe_b64decode(cursor).decode().rpartition(":")
        return int(number) if whose == account else None
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(command.main(run))
