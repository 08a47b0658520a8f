"""The fake cloud as a provider. It may be configured many times under different names, each with its ``url``.

What kind of cloud it is (regions, tiers, lags, idempotent creates) it says itself when it is opened, so that
one scenario can pose as any cloud. Options: ``url`` (required) and ``token_env``, the name of the environment
variable that holds the credential.

A create is answered by a `Rejection` only for this cloud's documented codes in a 4xx answer. No connection
at all is `Throttled`, because nothing can have been carried out; everything else is `OutcomeUnknown`.
"""

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from providers.base import (
    Accelerator,
    Accepted,
    Access,
    Attempt,
    BillingRule,
    BlockScope,
    CredentialRejected,
    EgressMode,
    End,
    EndReason,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    Offering,
    OutcomeUnknown,
    PortAddress,
    Provider,
    ProviderConfig,
    ProviderError,
    ProviderFactory,
    Ref,
    Rejection,
    RejectionKind,
    ResourceId,
    Round,
    Terminated,
    Throttled,
    Traits,
    Unavailable,
    Workload,
    usd_per_hour,
)
from providers.capabilities import (
    BillLine,
    Bills,
    Dropped,
    Extends,
    HasParts,
    Part,
    PartRound,
    Restarts,
)
from providers.fake import wire
from providers.fake.client import FakeClient, NoAnswer, NotSent, Reply

_OPTIONS = {"url", "token_env"}
_CALL_TIMEOUT_S = 10.0
_UNSENT_RETRY_S = 1.0
_GIB = 1024**3

Body = TypeVar("Body", bound=BaseModel)

_REJECTIONS = {
    "sold_out": RejectionKind.CAPACITY,
    "quota_exceeded": RejectionKind.QUOTA,
    "bad_credential": RejectionKind.AUTH,
    "not_offered": RejectionKind.UNSUPPORTED,
    "no_such_region": RejectionKind.UNSUPPORTED,
    "invalid_request": RejectionKind.INVALID,
    "price_too_high": RejectionKind.PRICE,
}
_STATES = {
    "queued": MachineState.QUEUED,
    "booting": MachineState.BOOTING,
    "running": MachineState.RUNNING,
    "exited": MachineState.EXITED,
    "ending": MachineState.EXITED,  # terminate was accepted, and something is still there
    "gone": MachineState.GONE,
}
_ABSENT = ("no_such_machine", "no_output")
_END_REASONS = {reason.value: reason for reason in EndReason}


class _Garbled(Unavailable):
    """A success by its status, and a body that cannot be used."""


class FakeProvider:
    """One account of one fake cloud. `open` makes it."""

    def __init__(self, config: ProviderConfig, *, client: FakeClient, about: wire.About) -> None:
        timeout_s = config.call_timeout_s or _CALL_TIMEOUT_S
        self.url = config.options["url"]
        self._name = config.name
        self._account = config.account
        self._client = client
        self._dead_man_s = config.dead_man_s if about.dead_man else None
        self._traits = Traits(
            tiers=about.tiers,
            settle_after_s=about.settle_after_s if config.settle_after_s is None else config.settle_after_s,
            replay_for_s=about.idempotent_for_s,
            list_every_s=about.list_every_s,
            calls_per_s=about.calls_per_s,
            call_burst=max(20, int(about.calls_per_s)),
            call_timeout_s=timeout_s,
            provision_deadline_s=timeout_s,
            boot_deadline_s=60.0 + 10 * about.boot_s,
            completion=about.completion,
            max_lifetime_s=about.max_lifetime_s,
            lists_by_region=about.lists_by_region,
            needs_accelerator=about.needs_accelerator,
            ended_listed_s=about.ended_listed_s,
            graceful_stop=True,
            dead_man=about.dead_man,
            billing=(
                BillingRule(
                    kind=None,
                    starts=about.bills_from,
                    until=about.bills_until,
                    step_s=about.bill_step_s,
                    minimum_s=about.bill_minimum_s,
                    reclaim_free_s=about.bill_reclaim_free_s,
                ),
            ),
        )

    @classmethod
    async def open(cls, config: ProviderConfig) -> "FakeProvider":
        """Read what kind of cloud it is.

        Raises:
            ValueError: an option is missing, unknown or wrong.
            Unavailable: the cloud does not answer; open again later.
        """
        url, token = _checked(config)
        client = FakeClient(url, token=token, timeout_s=config.call_timeout_s or _CALL_TIMEOUT_S)
        try:
            reply = await _read(client, "/v1/about")
            about = parsed(wire.About, reply)
            if about.processes:
                from providers.fake.running import RestartingRunningFakeProvider, RunningFakeProvider

                running = RestartingRunningFakeProvider if about.restarts else RunningFakeProvider
                return running(config, client=client, about=about)
            kind = RestartingFakeProvider if about.restarts else cls
            return kind(config, client=client, about=about)
        except BaseException:
            await client.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def traits(self) -> Traits:
        return self._traits

    async def account(self) -> str:
        return parsed(wire.AccountBody, await _read(self._client, "/v1/account")).account_id

    def validate(self, workload: Workload) -> str | None:
        """It runs anything, but cannot keep a workload from the network."""
        if workload.egress.mode is not EgressMode.OPEN:
            return f"egress {workload.egress.mode} cannot be enforced here: use Open, or another provider"
        for name in ("FAKE_EXIT_AFTER_S", "FAKE_EXIT_CODE", "FAKE_STOP_AFTER_S", "FAKE_STOP_CODE"):
            value = workload.env.get(name, "")
            if value and not value.replace(".", "", 1).isdecimal():
                return f"env {name} must be a number"
        return None

    async def offers(self) -> Sequence[Offering]:
        body = parsed(wire.OffersBody, await _read(self._client, "/v1/offers"))
        return [
            Offering(
                provider=self._name,
                account=self._account,
                region=item.region,
                tier=item.tier,
                accelerator=Accelerator(type=item.accelerator, count=item.count)
                if item.accelerator
                else None,
                shape=item.shape,
                meters=_meters(item.meters),
            )
            for item in body.items
        ]

    def quote(self, workload: Workload, offering: Offering) -> tuple[Meter, ...]:
        """The offering's own meters; where disk is sold apart, at least as much as the workload asks for."""
        gib = Decimal(_disk_gib(workload) or 0)
        return tuple(
            Meter(kind=meter.kind, quantity=max(meter.quantity, gib), usd=meter.usd, label=meter.label)
            if meter.kind is MeterKind.DISK
            else meter
            for meter in offering.meters
        )

    async def provision(
        self,
        attempt: Attempt,
        workload: Workload,
        *,
        offering: Offering,
        access: Access | None,
        avoid: frozenset[str],
    ) -> Accepted | Rejection:
        price, ceiling = usd_per_hour(self.quote(workload, offering)), attempt.ceiling_usd_per_hour
        if price is not None and ceiling is not None and price > ceiling:
            message = f"{price} dollars an hour is above the ceiling of {ceiling}"
            return _rejection(RejectionKind.PRICE, message, attempt=attempt, offering=offering, host=None)
        if reason := self.validate(workload):
            return Rejection(kind=RejectionKind.INVALID, message=reason)
        body = _order(attempt, workload, offering=offering, avoid=avoid)
        if workload.dead_man and self._dead_man_s is not None:
            body["expires_after_s"] = self._dead_man_s
        try:
            reply = await self._client.call("POST", "/v1/machines", body=body)
        except NotSent as error:
            raise Throttled(_UNSENT_RETRY_S, str(error)) from error
        except NoAnswer as error:
            raise OutcomeUnknown(str(error)) from error
        if reply.ok:
            return self._accepted(attempt, reply)
        if reply.status == 429:
            raise Throttled(reply.retry_after_s, reply.message)
        kind = _REJECTIONS.get(reply.code)
        if kind is None or not 400 <= reply.status < 500:
            raise OutcomeUnknown(f"create answered {reply.status} {reply.code}".rstrip())
        if reply.code == "no_such_region":
            return Rejection(kind=kind, message=reply.message, scope=BlockScope(region=attempt.region))
        return _rejection(kind, reply.message, attempt=attempt, offering=offering, host=reply.host)

    async def list(self, regions: frozenset[str]) -> Sequence[Round]:
        asked = sorted(regions) if self._traits.lists_by_region else [""]
        answers = await asyncio.gather(*(self._round(region) for region in asked), return_exceptions=True)
        rounds: list[Round] = []
        errors: list[ProviderError] = []
        for region, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Round):
                rounds.append(answer)
            elif isinstance(answer, ProviderError):
                rounds.append(Round(region=region, account_id=None, machines=(), unknown=str(answer)))
                errors.append(answer)
            else:
                raise answer
        if errors and len(errors) == len(rounds):
            raise errors[0]
        return rounds

    async def get(self, ref: Ref) -> Machine | None:
        reply = await self._ask("GET", ref)
        return None if reply is None else self._machine(parsed(wire.MachineBody, reply))

    async def stop(self, ref: Ref, *, grace_s: int) -> None:
        await self._ask("POST", ref, action="/stop", body={"grace_s": grace_s})

    async def terminate(self, ref: Ref) -> Terminated:
        reply = await self._ask("DELETE", ref)
        return Terminated.NOT_FOUND if reply is None else Terminated.ACCEPTED

    async def bill(self, *, since: datetime, until: datetime) -> Sequence[BillLine]:
        query = {"since": since.isoformat(), "until": until.isoformat()}
        body = parsed(wire.BillBody, await _read(self._client, "/v1/bill", query=query))
        if foreign := sorted({item.currency for item in body.items} - {"USD"}):
            raise _Garbled(f"the bill is in {', '.join(foreign)}: only dollars can be added up")
        return [
            BillLine(
                resource_id=ResourceId(item.id),
                identity=item.name,
                kind=None,
                start=item.start,
                end=item.end,
                usd=item.usd,
            )
            for item in body.items
            if item.usd is not None
        ]

    async def extend(self, ref: Ref) -> bool:
        body = {"for_s": self._dead_man_s}
        return await self._ask("POST", ref, action="/extend", body=body) is not None

    async def parts(self, regions: frozenset[str]) -> Sequence[PartRound]:
        asked = sorted(regions) if self._traits.lists_by_region else [""]
        return [await self._parts_of(region) for region in asked]

    async def drop_part(self, part: Part) -> Dropped:
        reply = await _call(self._client, "DELETE", f"/v1/parts/{part.ref.resource_id}")
        if reply.status == 404 and reply.code == "no_such_part":
            return Dropped.NOT_FOUND
        if reply.status == 409 and reply.code == "in_use":
            return Dropped.IN_USE
        _usable(reply)
        return Dropped.ACCEPTED

    async def _parts_of(self, region: str) -> PartRound:
        query = {"region": region} if region else None
        body = parsed(wire.PartsBody, await _read(self._client, "/v1/parts", query=query))
        parts = tuple(
            Part(
                ref=Ref(
                    provider=self._name,
                    account=self._account,
                    region=item.region,
                    resource_id=ResourceId(item.id),
                ),
                kind=item.kind,
                identity=item.name,
                created_at=item.created_at,
                in_use=item.in_use,
            )
            for item in body.items
        )
        short = f"{len(parts)} parts were shown, and {body.total} counted"
        unknown = None if body.total == len(parts) else short
        return PartRound(region=region, account_id=body.account_id, parts=parts, unknown=unknown)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self, method: str, ref: Ref, *, action: str = "", body: dict[str, Any] | None = None
    ) -> Reply | None:
        """A call about one machine; None only when the cloud itself says that there is no such machine."""
        path = f"/v1/machines/{ref.resource_id}{action}"
        query = {"region": ref.region} if ref.region else None
        reply = await _call(self._client, method, path, query=query, body=body)
        if reply.status == 404 and reply.code in _ABSENT:
            return None
        return _usable(reply)

    async def _round(self, region: str) -> Round:
        """One region's list, page by page. Only a list that was read to its proven end is complete."""
        machines: dict[str, Machine] = {}
        account: str | None = None
        cursor: str | None = None
        seen: set[str] = set()
        offset_s: float | None = None
        calls, unknown = 0, None
        while unknown is None:
            query = ({"region": region} if region else {}) | ({"cursor": cursor} if cursor else {})
            calls += 1
            try:
                reply = await _read(self._client, "/v1/machines", query=query)
                page = parsed(wire.PageBody, reply)
            except ProviderError as error:
                if calls == 1 and not isinstance(error, _Garbled):
                    raise
                unknown = f"page {calls}: {error}"
                break
            offset_s = reply.clock_offset_s if offset_s is None else offset_s
            if account not in (None, page.account_id):
                unknown = f"page {calls} is that of account {page.account_id}, not of {account}"
                break
            account = page.account_id
            if any(item.id in machines for item in page.items):
                unknown = f"page {calls} shows machines of an earlier page"
            machines |= {item.id: self._machine(item) for item in page.items}
            if page.next is None:
                if unknown is None and page.total != len(machines):
                    unknown = f"{len(machines)} machines were shown, and {page.total} counted"
                break
            if page.next in seen:
                unknown = f"page {calls} leads back to an earlier page"
            seen.add(page.next)
            cursor = page.next
        return Round(
            region=region,
            account_id=account,
            machines=tuple(machines.values()),
            unknown=unknown,
            calls=calls,
            clock_offset_s=offset_s,
        )

    def _accepted(self, attempt: Attempt, reply: Reply) -> Accepted:
        try:
            body = wire.CreatedBody.model_validate_json(reply.raw)
        except ValidationError as error:
            raise OutcomeUnknown("create was answered with a body that cannot be read") from error
        if body.name != attempt.identity or body.tier != attempt.tier:
            raise OutcomeUnknown(f"create was answered with another machine, {body.id}")
        return Accepted(
            ref=self._ref(body),
            account_id=body.account_id,
            reserved=body.reserved,
            meters=_meters(body.meters),
            created_at=body.created_at,
            clock_offset_s=reply.clock_offset_s,
            host=body.host,
        )

    def _machine(self, body: wire.MachineBody) -> Machine:
        state = _STATES.get(body.state)
        return Machine(
            ref=self._ref(body),
            identity=body.name,
            state=state or MachineState.BOOTING,
            created_at=body.created_at,
            started_at=body.started_at,
            end=_end(body.end),
            endpoint=body.address,
            ports=tuple(PortAddress(port=each.port, address=each.address) for each in body.ports),
            meters=_meters(body.meters),
            host=body.host,
            trouble=None if state else f"the cloud says {body.state!r}",
            expires_at=body.expires_at,
        )

    def _offering(self, body: wire.OfferBody) -> Offering:
        kind = body.accelerator
        return Offering(
            provider=self._name,
            account=self._account,
            region=body.region,
            tier=body.tier,
            accelerator=Accelerator(type=kind, count=body.count) if kind else None,
            shape=body.shape,
            meters=_meters(body.meters),
        )

    def _ref(self, body: wire.MachineBody) -> Ref:
        return Ref(
            provider=self._name, account=self._account, region=body.region, resource_id=ResourceId(body.id)
        )


class RestartingFakeProvider(FakeProvider):
    """One that starts a workload again on its machine: a capability is there or is not, so it is a class."""

    async def restart(self, ref: Ref) -> bool:
        path = f"/v1/machines/{ref.resource_id}/restart"
        query = {"region": ref.region} if ref.region else None
        try:
            reply = await self._client.call("POST", path, query=query)
        except NotSent as error:
            raise Unavailable(str(error)) from error
        except NoAnswer as error:
            raise OutcomeUnknown(str(error)) from error
        if reply.status == 404 and reply.code == "no_such_machine":
            return False
        if reply.status >= 500:
            raise OutcomeUnknown(f"restart answered {reply.status} {reply.code}".rstrip())
        _usable(reply)
        return True


_factory: ProviderFactory = FakeProvider
_provider: type[Provider] = FakeProvider
_extends: type[Extends] = FakeProvider
_has_parts: type[HasParts] = FakeProvider
_restarts: type[Restarts] = RestartingFakeProvider
_bills: type[Bills] = FakeProvider


def _checked(config: ProviderConfig) -> tuple[str, str | None]:
    """URL and credential from the options."""
    options = config.options
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(f"{config.name}: no such option: {', '.join(unknown)} (known: url, token_env)")
    url = options.get("url", "")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{config.name}: option url must be the fake cloud's http:// address")
    variable = options.get("token_env")
    if variable is None:
        return url, None
    if not (token := os.environ.get(variable)):
        raise ValueError(f"{config.name}: option token_env: the variable {variable} is empty")
    return url, token


async def _call(
    client: FakeClient,
    method: str,
    path: str,
    *,
    query: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
) -> Reply:
    """A call that may be made again at will, so that every break means the same."""
    try:
        return await client.call(method, path, query=query, body=body)
    except (NotSent, NoAnswer) as error:
        raise Unavailable(str(error)) from error


async def _read(client: FakeClient, path: str, *, query: dict[str, str] | None = None) -> Reply:
    return _usable(await _call(client, "GET", path, query=query))


def _usable(reply: Reply) -> Reply:
    if reply.ok:
        return reply
    if reply.status == 429:
        raise Throttled(reply.retry_after_s, reply.message)
    if reply.code == "bad_credential":
        raise CredentialRejected(reply.message)
    if reply.status < 300:
        raise _Garbled(f"the answer is an error: {reply.code}: {reply.message}")
    raise Unavailable(f"the answer was {reply.status} {reply.code}: {reply.message}")


def parsed(kind: type[Body], reply: Reply) -> Body:
    try:
        return kind.model_validate_json(reply.raw)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) or "the body" for item in error.errors()[:3])
        raise _Garbled(f"the answer cannot be read: {fields}") from None


def _order(
    attempt: Attempt, workload: Workload, *, offering: Offering, avoid: frozenset[str]
) -> dict[str, Any]:
    accelerator, ceiling = offering.accelerator, attempt.ceiling_usd_per_hour
    login = workload.registry
    joined = {"stdin": workload.stdin, "stdin_once": workload.stdin_once, "terminal": workload.terminal}
    return {
        **{name: True for name, on in joined.items() if on},
        "name": attempt.identity,
        "token": attempt.token,
        "region": attempt.region,
        "tier": attempt.tier.value,
        "accelerator": accelerator.type if accelerator else None,
        "count": accelerator.count if accelerator else 1,
        "image": workload.image,
        "command": list(workload.command),
        "args": list(workload.args),
        "env": dict(workload.env),
        "registry": None
        if login is None
        else {"server": login.server, "username": login.username, "password": login.password},
        "ports": list(workload.ports),
        "disk_gib": _disk_gib(workload),
        "max_usd_per_hour": None if ceiling is None else str(ceiling),
        "avoid_hosts": sorted(avoid),
    }


def _disk_gib(workload: Workload) -> int | None:
    return None if workload.disk_bytes is None else -(-workload.disk_bytes // _GIB)


def _rejection(
    kind: RejectionKind, message: str, *, attempt: Attempt, offering: Offering, host: str | None
) -> Rejection:
    """With the narrowest scope that is true: a named host alone, else this shape in this tier and region."""
    scope: BlockScope | None
    if kind is RejectionKind.INVALID:
        scope = None
    elif kind is RejectionKind.AUTH:
        scope = BlockScope(everything=True)
    elif host:
        scope = BlockScope(host=host)
    else:
        accelerator = offering.accelerator.key if offering.accelerator else ""
        scope = BlockScope(accelerator=accelerator, tier=attempt.tier, region=attempt.region)
    return Rejection(kind=kind, message=message, scope=scope)


def _meters(bodies: list[wire.MeterBody]) -> tuple[Meter, ...]:
    return tuple(Meter(kind=body.kind, quantity=body.quantity, usd=body.usd) for body in bodies)


def _end(body: wire.EndBody | None) -> End | None:
    if body is None:
        return None
    reason = _END_REASONS.get(body.reason, EndReason.UNKNOWN)
    return End(reason=reason, exit_code=body.exit_code, message=body.message, at=body.at, image=body.image)
