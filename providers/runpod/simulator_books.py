"""What the simulated RunPod has besides pods: catalogue, templates, registry logins, and credit."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from catalog.catalogue import load
from providers.base import Tier
from providers.runpod.simulator_rules import LOW_BALANCE, Quirks, Wrong, problem
from providers.simulation.clock import MICROS_PER_S, as_text, micros
from providers.simulation.engine import Engine
from providers.simulation.http import Answer, Asked
from providers.simulation.meter import bill_usd, billed_spans
from providers.simulation.orders import Order
from providers.simulation.state import Machine

WORDS: Final = {Tier.ON_DEMAND: "SECURE", Tier.SPOT: "COMMUNITY"}
_ID_CHARS = 14
_HOUR = 3600 * MICROS_PER_S
_BILL_DIGITS = 8


def account_of(engine: Engine, asked: Asked) -> str:
    """Whose answer a call gets."""
    own = engine.scenario.account
    return f"{own}-other" if asked.fault("foreign") else own


class Books:
    """Of one cloud. ``ids`` leads from RunPod's id of a card to the scenario's name."""

    def __init__(self, engine: Engine, quirks: Quirks) -> None:
        self._engine, self._quirks = engine, quirks
        written = load().of("runpod")
        ids = {row.accelerator.type.lower(): row.shape for row in reversed(written.rows) if row.accelerator}
        self.ids: dict[str, str] = {}  # RunPod's id of a card -> the scenario's name
        for offer in engine.scenario.offers:
            if offer.accelerator is not None:
                own = written.aliases.get(offer.accelerator.lower(), offer.accelerator).lower()
                shape = ids.get(own, offer.accelerator)
                self.ids[shape.removeprefix("community/")] = offer.accelerator

    # --- the catalogue ---

    def gpus(self, asked: Asked) -> Answer:
        if "AVAILABILITY" in asked.query.get("include", "") and not asked.query.get("product"):
            raise Wrong(400, "product is required with AVAILABILITY")
        prices: dict[tuple[str, str], str | None] = {}
        most: dict[tuple[str, str], int] = {}
        for _, tier, offer, count, meters in self._engine.market.offers():
            key = (offer.accelerator or "", WORDS[tier])
            prices[key] = meters[0][2]
            most[key] = max(count, most.get(key, 0))
        return Answer(
            body={"gpus": [self._gpu(asked, own, name, prices, most) for own, name in self.ids.items()]}
        )

    def _gpu(
        self,
        asked: Asked,
        own: str,
        name: str,
        prices: dict[tuple[str, str], str | None],
        most: dict[tuple[str, str], int],
    ) -> dict[str, Any]:
        price = {word.lower(): number_of(prices.get((name, word))) for word in WORDS.values()}
        body: dict[str, Any] = {
            "id": own,
            "name": name,
            "manufacturer": "AMD" if own.startswith("AMD") else "NVIDIA",
            "secure": (name, "SECURE") in most,
            "community": (name, "COMMUNITY") in most,
            "price": price,
            "maxCount": {word.lower(): most.get((name, word), 0) for word in WORDS.values()},
        }
        if "AVAILABILITY" in asked.query.get("include", ""):
            body["availability"] = self._quirks.stock.get(name) or self._stock(name, asked.query.get("cloud"))
        return body

    def _stock(self, name: str, cloud: str | None) -> str:
        market = self._engine.market
        pools = [
            pool
            for pool, _, _ in market.capacity()
            if pool[2] == name.lower() and cloud in (None, WORDS[Tier(pool[1])])
        ]
        return "HIGH" if any(market.room(pool, 1) for pool in pools) else "NONE"

    def datacenters(self, _asked: Asked) -> Answer:
        return Answer(
            body={"dataCenters": [{"id": each, "name": each} for each in self._engine.scenario.regions]}
        )

    # --- parts ---

    def templates(self, asked: Asked) -> Answer:
        shown = (
            self.kept("templates") if account_of(self._engine, asked) == self._engine.scenario.account else {}
        )
        return Answer(body={"templates": [{"id": key, "name": one["name"]} for key, one in shown.items()]})

    def make_template(self, asked: Asked) -> Answer:
        body = asked.json or {}
        if not body.get("name") or not body.get("image"):
            raise Wrong(422, "Request validation failed.", ("$: name and image are required",))
        own = self._add("templates", {"name": body["name"]})
        return Answer(status=201, body={"id": own, "name": body["name"]})

    def drop_template(self, asked: Asked) -> Answer:
        return self._drop("templates", asked.path["id"], "template not found")

    def registries(self, _asked: Asked) -> Answer:
        shown = self.kept("registries")
        return Answer(body={"registries": [{"id": key, "name": one["name"]} for key, one in shown.items()]})

    def make_registry(self, asked: Asked) -> Answer:
        body = asked.json or {}
        if not all(body.get(key) for key in ("name", "username", "password")):
            raise Wrong(422, "Request validation failed.", ("$: name, username and password are required",))
        login = hashlib.sha256(f"{body['username']}:{body['password']}".encode()).hexdigest()
        own = self._add("registries", {"name": body["name"], "login": login, "at": asked.now})
        return Answer(status=201, body={"id": own, "name": body["name"]})

    def drop_registry(self, asked: Asked) -> Answer:
        own = asked.path["id"]
        if any(m.labels.get("registry") == own and m.state != "gone" for m in self._engine.machines.values()):
            raise Wrong(400, "the registry is in use by a pod")
        return self._drop("registries", own, "registry not found")

    # --- the bill ---

    def bill(self, asked: Asked) -> Answer:
        """Each pod's hours inside the window, those that are over for ``bill_lag_s``."""
        query = asked.query
        if query.get("bucketSize") != "hour":
            raise Wrong(422, "Request validation failed.", ("bucketSize: only hour is simulated",))
        try:
            since, until = (_micros(query[name]) for name in ("startTime", "endTime"))
        except (KeyError, ValueError):
            message = "startTime and endTime: must be RFC 3339"
            raise Wrong(422, "Request validation failed.", (message,)) from None
        late = asked.now - micros(self._quirks.bill_lag_s)
        account, billing = account_of(self._engine, asked), self._engine.scenario.billing
        records = []
        for machine in self._engine.machines.values():
            spans = list(billed_spans(machine, billing=billing, now=asked.now))
            if machine.account != account or not spans:
                continue
            hour = max(since - since % _HOUR, spans[0][0] - spans[0][0] % _HOUR)
            while hour < min(until, spans[-1][1]) and hour + _HOUR <= late:
                records.append(_hour_of(machine, spans, hour))
                hour += _HOUR
        return Answer(body={"records": [each for each in records if each["totalAmount"]], "metadata": {}})

    # --- the older APIs ---

    def graphql(self, asked: Asked) -> Answer:
        if self._quirks.graphql_retired:
            return Answer(status=404, body=b"not found", media_type="text/plain")
        query = (asked.json or {}).get("query", "")
        if "lastStatusChange" in query:
            machine = self._engine.machines.get(asked.json.get("variables", {}).get("id", ""))
            said = {"lastStatusChange": _said(machine, asked.now)} if machine else None
            return Answer(body={"data": {"pod": said}})
        if "clientBalance" in query:
            left = self._credit(asked.now)
            spend = sum(filter(None, (self.cost(m) for m in self._billing())), Decimal(0))
            myself = {"clientBalance": number_of(left), "currentSpendPerHr": float(spend), "spendLimit": 80}
            return Answer(body={"data": {"myself": myself}})
        error = {"message": "Cannot query field.", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}
        return Answer(status=400, body={"errors": [error]})

    def v1(self, _asked: Asked) -> Answer:
        return problem(410, "REST v1 was retired on 2026-11-15")

    def check_credit(self, order: Order, now: int) -> None:
        left = self._credit(now)
        if left is None:
            return
        region = (self._engine.scenario.regions or ("",))[0]
        placed = replace(order, region=region)
        hour = sum(
            (Decimal(q) * Decimal(usd or 0) for _, q, usd in self._engine.market.meters(placed)), Decimal(0)
        )
        if left < hour:
            raise Wrong(402, LOW_BALANCE)

    def _credit(self, now: int) -> Decimal | None:
        if self._quirks.balance_usd is None:
            return None
        billing = self._engine.scenario.billing
        bills = (bill_usd(m, billing=billing, now=now) for m in self._engine.machines.values())
        return self._quirks.balance_usd - sum((bill or Decimal(0) for bill in bills), Decimal(0))

    def collect(self, now: int) -> None:
        """No credit, no pods."""
        if (left := self._credit(now)) is not None and left <= 0:
            for machine in list(self._billing()):
                self._engine.terminate(machine.id, now=now)

    def _billing(self) -> Iterator[Machine]:
        own = self._engine.scenario.account
        return (m for m in self._engine.machines.values() if m.state != "gone" and m.account == own)

    def kept(self, kind: str) -> dict[str, Any]:
        kept: dict[str, Any] = self._engine.kept.get(kind, {})
        return kept

    def _add(self, kind: str, value: dict[str, Any]) -> str:
        kept = self.kept(kind)
        number = self._engine.kept.get("numbers", 0) + 1
        self._engine.keep("numbers", number)
        own = id_of(f"{self._engine.scenario.account}/{kind}/{number}")
        self._engine.keep(kind, {**kept, own: value})
        return own

    def _drop(self, kind: str, own: str, missing: str) -> Answer:
        kept = dict(self.kept(kind))
        if kept.pop(own, None) is None:
            raise Wrong(404, missing)
        self._engine.keep(kind, kept)
        return Answer(status=204)

    def cost(self, machine: Machine) -> Decimal | None:
        """Dollars an hour for the cards; None where the scenario tells no price."""
        if not machine.rates or not machine.rates[-1][1]:
            return None
        _, quantity, usd = machine.rates[-1][1][0]
        return None if usd is None else Decimal(quantity) * Decimal(usd)


def _hour_of(machine: Machine, spans: list[tuple[int, int]], hour: int) -> dict[str, Any]:
    """One hour of one pod, at the rate of its last span."""
    billed_s = sum(max(0, min(to, hour + _HOUR) - max(since, hour)) for since, to in spans)
    amounts = {"gpu": Decimal(0), "disk": Decimal(0)}
    for kind, quantity, usd in machine.rates[-1][1] if machine.rates else ():
        amount = Decimal(quantity) * Decimal(usd or 0) * billed_s / _HOUR
        amounts["disk" if kind == "disk" else "gpu"] += amount
    exact = {f"{name}Amount": float(round(amount, _BILL_DIGITS)) for name, amount in amounts.items()}
    return {
        "podId": machine.id,
        "startTime": as_text(hour),
        "endTime": as_text(hour + _HOUR),
        "totalAmount": float(round(sum(amounts.values(), Decimal(0)), _BILL_DIGITS)),
        "cpuAmount": 0,
        **exact,
    }


def _micros(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * MICROS_PER_S)


def id_of(text: str) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()[:_ID_CHARS]


def number_of(usd: Decimal | str | None) -> float | None:
    return None if usd is None else float(usd)


def _said(machine: Machine, now: int) -> str:
    """``lastStatusChange``, the free text of the older API."""
    at = as_text(machine.ended_at or now)
    match machine.end_reason:
        case "failed":
            return f"Exited by Runpod: {machine.end_message}"
        case "preempted":
            return (
                f"Outbid: {at}" if machine.tier == Tier.SPOT else f"Exited by Runpod: {machine.end_message}"
            )
        case "terminated" if machine.state == "exited":
            return f"Exited by user: {at}"
        case "terminated":
            return f"Terminated by user: {at}"
        case _:
            return f"Rented by User: {at}"
