"""RunPod as a provider: one pod for one claim, bought on demand, over REST v2.

What RunPod does not have, and what follows from it:

* no idempotent creates: names repeat, so a create is sent once, and what came of a lost answer is looked for;
* no name of the account: a template of ours, which only this account can show, stands for it (`proof`);
* no tags: the identity is in the pod's name and in its environment;
* no end: a container whose process ends is started again, for ever, and no exit code is ever told. So
  ``completion`` is never, but for a Pod whose option has a shell tell its command's end in the log;
* no spot machines, since the API that had them is being taken away.

Options of an account: ``url``, ``graphql_url``, ``cloud`` (the default of the Pod's option), ``key_env``,
``disk_usd_per_gb_month``, ``pull_window_s``, ``calls_per_s``, ``call_burst``, ``list_every_s``,
``job_every_s`` and ``capacity_texts``.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from pydantic import ValidationError

from catalog.catalogue import load
from catalog.regions import words_of
from providers.base import (
    Accepted,
    Access,
    Attempt,
    BillingRule,
    BillsFrom,
    BillsUntil,
    BlockScope,
    Completion,
    CredentialRejected,
    Machine,
    MachineState,
    Meter,
    MeterKind,
    NotOffered,
    Offering,
    OutcomeUnknown,
    Provider,
    ProviderConfig,
    ProviderFactory,
    Ref,
    Rejection,
    RejectionKind,
    ResourceId,
    Round,
    Terminated,
    Throttled,
    Tier,
    Traits,
    Unavailable,
    Workload,
    usd_per_hour,
)
from providers.capabilities import (
    Balance,
    BillLine,
    Bills,
    Chooses,
    CompletesByOption,
    Dropped,
    HasBalance,
    HasParts,
    LogChunk,
    Part,
    PartRound,
    Prepares,
    ReachableBySsh,
    Restarts,
    SshAddress,
    StreamsLogs,
)
from providers.runpod import orders, refusals
from providers.runpod.bills import lines_of
from providers.runpod.calls import InTime, call, parsed, read
from providers.runpod.client import NoAnswer, NotSent, Reply, RunPodClient
from providers.runpod.listing import Listing
from providers.runpod.logs import chunks
from providers.runpod.machines import gpu_meter, is_over, machine_of, meters_of, ssh_of, state_of
from providers.runpod.options import Options, checked
from providers.runpod.parts import Parts
from providers.runpod.prices import offerings_of
from providers.runpod.wire import SSH_VARIABLE, BillRecords, Centres, Gpus, Pod

KEY_VARIABLE: Final = "RUNPOD_API_KEY"

_CALL_TIMEOUT_S = 30.0
_PROVISION_S = 60.0
_UNSENT_RETRY_S = 1.0


class RunPod:
    """One account of RunPod. `open` makes it."""

    def __init__(self, config: ProviderConfig, options: Options, *, client: RunPodClient) -> None:
        timeout_s = config.call_timeout_s
        self._name = config.name
        self._account = config.account
        self._options = options
        self._client = client
        self._parts = Parts(
            client, provider=config.name, account=config.account, installation=config.installation
        )
        self._listing = Listing(
            client,
            parts=self._parts,
            pull_window_s=options.pull_window_s,
            job_every_s=options.job_every_s,
        )
        self._centres = frozenset(words_of("runpod").named)
        written = load().of("runpod").rows
        self._names = {
            row.shape.removeprefix(orders.COMMUNITY): row.accelerator.type
            for row in written
            if row.accelerator is not None
        }
        self._traits = Traits(
            tiers=frozenset({Tier.ON_DEMAND}),
            # Lists were seen to lag creates by seconds; a minute or two is allowed for. Not measured.
            settle_after_s=180.0 if config.settle_after_s is None else config.settle_after_s,
            list_every_s=options.list_every_s,
            # The documentation's example is 60 a minute; the real quota is unknown, and a 429 is obeyed.
            calls_per_s=options.calls_per_s,
            call_burst=options.call_burst,
            call_timeout_s=timeout_s or _CALL_TIMEOUT_S,
            provision_deadline_s=timeout_s or _PROVISION_S,
            boot_deadline_s=1800.0,  # large images were seen to take 20 minutes
            completion=Completion.NEVER,
            billing=(
                # When billing begins is not documented: at the create is the dearer reading. It goes on while
                # a command has ended and its shell waits, so until we end the pod.
                BillingRule(kind=MeterKind.GPU, starts=BillsFrom.ACCEPTED, until=BillsUntil.TERMINATE_ASKED),
                BillingRule(kind=MeterKind.DISK, starts=BillsFrom.ACCEPTED, until=BillsUntil.GONE),
            ),
            options=orders.OPTIONS,
        )

    @classmethod
    async def open(cls, config: ProviderConfig) -> "RunPod":
        """Open with the key of the Secret, else of the variable.

        Raises:
            ValueError: an option is unknown or wrong.
            CredentialRejected: there is no key yet.
        """
        options = checked(config)
        key = config.credentials.get(KEY_VARIABLE) or os.environ.get(options.key_env, "")
        if not key.strip():
            raise CredentialRejected(
                f"no API key: put {KEY_VARIABLE} into the account's Secret, or set variable {options.key_env}"
            )
        client = RunPodClient(
            url=options.url,
            graphql_url=options.graphql_url,
            key=key.strip(),
            timeout_s=config.call_timeout_s or _PROVISION_S,
        )
        return cls(config, options, client=client)

    @property
    def name(self) -> str:
        return self._name

    @property
    def traits(self) -> Traits:
        return self._traits

    async def account(self) -> str:
        async with self._in_time():
            return await self._parts.proof(make=True) or ""

    def validate(self, workload: Workload) -> str | None:
        return orders.impossible(workload)

    async def offers(self) -> Sequence[Offering]:
        query = {"include": "AVAILABILITY", "product": "POD"}
        async with self._in_time():
            reply = await read(self._client, "/catalog/gpus", query=query)
            with suppress(Unavailable):  # those that we know will do
                centres = parsed(Centres, await read(self._client, "/catalog/datacenters"))
                self._centres |= {each.id for each in centres.centres}
        return offerings_of(
            parsed(Gpus, reply),
            provider=self._name,
            account=self._account,
            names=self._names,
            disk_usd=self._options.disk_usd,
        )

    def choose(self, workload: Workload, offerings: Sequence[Offering]) -> Sequence[Offering]:
        """Hosts of the marketplace where the option says so, else data centres; never one for the other."""
        community = orders.wants_community(workload.options, default=self._options.cloud)
        return [each for each in offerings if each.shape.startswith(orders.COMMUNITY) is community]

    def completion_of(self, workload: Workload) -> Completion:
        return Completion.CODE if orders.reports(workload) else Completion.NEVER

    def quote(self, workload: Workload, offering: Offering) -> tuple[Meter, ...]:
        disk = Meter(
            kind=MeterKind.DISK, quantity=Decimal(orders.disk_gb(workload)), usd=self._options.disk_usd
        )
        return (*(meter for meter in offering.meters if meter.kind is not MeterKind.DISK), disk)

    async def prepare(
        self,
        workload: Workload,
        *,
        offering: Offering,
        region: str,
        ceiling_usd_per_hour: Decimal | None,
        options: Mapping[str, str],
        avoid: frozenset[str],
    ) -> Mapping[str, str] | Rejection:
        """The id of the registry login that the image is pulled with; nothing for a public one."""
        if (refused := self._unplaceable(region, offering)) is not None:
            return refused
        if workload.registry is None:
            return {}
        async with self._in_time():
            return {orders.REGISTRY_PIN: await self._parts.login(workload.registry)}

    async def provision(
        self,
        attempt: Attempt,
        workload: Workload,
        *,
        offering: Offering,
        access: Access | None,
        avoid: frozenset[str],
    ) -> Accepted | Rejection:
        if (refused := self._unsendable(attempt, workload, offering)) is not None:
            return refused
        if orders.wants_ssh(workload) and access is None:
            return Rejection(kind=RejectionKind.INVALID, message="option ssh: this installation has no keys")
        body = orders.order(attempt, workload, offering=offering, access=access, at=int(self._client.now_s()))
        try:
            async with asyncio.timeout(self._traits.provision_deadline_s):
                reply = await self._client.call("POST", "/pods", body=body)
        except NotSent as error:
            raise Throttled(_UNSENT_RETRY_S, str(error)) from error
        except (NoAnswer, TimeoutError) as error:
            raise OutcomeUnknown(str(error) or "the create was not answered in time") from error
        if reply.ok:
            return await self._accepted(attempt, offering, reply)
        if reply.status == 429:
            raise Throttled(reply.retry_after_s, reply.said)
        answer = refusals.refusal(
            reply,
            accelerator=_key(offering),
            region=attempt.region,
            tier=attempt.tier,
            capacity=self._options.capacity_texts,
        )
        if answer is None:
            raise OutcomeUnknown(f"the create was answered with {reply.status}: {reply.said}")
        return answer

    async def list(self, regions: frozenset[str]) -> Sequence[Round]:
        return [await self._listing.round(self._machine)]

    async def get(self, ref: Ref) -> Machine | None:
        async with self._in_time():
            reply = await self._ask("GET", ref)
            if reply is None:
                return None
            pod = parsed(Pod, reply)
            await self._listing.explain([pod])
            await self._listing.look_at_jobs([pod])
        return self._machine(pod)

    async def stop(self, ref: Ref, *, grace_s: int) -> None:
        """Nothing: RunPod's own stop frees the cards and keeps the pod, to be started by anybody."""

    async def terminate(self, ref: Ref) -> Terminated:
        async with self._in_time():
            reply = await self._ask("DELETE", ref)
        return Terminated.NOT_FOUND if reply is None else Terminated.ACCEPTED

    async def restart(self, ref: Ref) -> bool:
        path = f"/pods/{ref.resource_id}/action"
        try:
            async with asyncio.timeout(self._traits.call_timeout_s):
                reply = await self._client.call("POST", path, body={"action": "restart"})
        except NotSent as error:
            raise Unavailable(str(error)) from error
        except (NoAnswer, TimeoutError) as error:
            raise OutcomeUnknown(str(error) or "the restart was not answered in time") from error
        if refusals.is_no_such_pod(reply):
            return False
        if reply.status == 409 and reply.problem is not None:  # not in the state that it is in
            machine = await self.get(ref)
            if machine is None or machine.state in (MachineState.EXITED, MachineState.GONE):
                return False
        if reply.status >= 500:
            raise OutcomeUnknown(f"the restart was answered with {reply.status}: {reply.said}")
        if not reply.ok:
            raise refusals.failure(reply)
        return True

    async def logs(
        self, ref: Ref, *, follow: bool, since: datetime | None, tail_lines: int | None
    ) -> AsyncIterator[LogChunk] | None:
        async with self._in_time():
            if await self._ask("GET", ref) is None:
                return None

        async def over() -> bool:
            machine = await self.get(ref)
            return machine is None or machine.state in (MachineState.EXITED, MachineState.GONE)

        return chunks(
            self._client,
            ref.resource_id,
            follow=follow,
            since=since,
            tail_lines=tail_lines,
            over=over,
            connect_s=self._traits.call_timeout_s,
        )

    async def ssh(self, ref: Ref) -> SshAddress | None:
        async with self._in_time():
            reply = await self._ask("GET", ref)
        if reply is None:
            return None
        pod = parsed(Pod, reply)
        if SSH_VARIABLE not in pod.env or pod.reporter is None:
            raise NotOffered(
                "RunPod has no exec, and an sshd was not asked for"
                f" (annotation cloud.aibrix.ai/{self._name}-ssh: image, or start)"
            )
        address = ssh_of(pod, identity=pod.reporter)
        if address is None or is_over(pod):
            raise Unavailable("its port 22 has no address outside now")
        return address

    async def parts(self, regions: frozenset[str]) -> Sequence[PartRound]:
        async with self._in_time():
            return [await self._parts.round()]

    async def drop_part(self, part: Part) -> Dropped:
        async with self._in_time():
            return await self._parts.drop(part)

    async def bill(self, *, since: datetime, until: datetime) -> Sequence[BillLine]:
        query = {"bucketSize": "hour", "startTime": _zulu(since), "endTime": _zulu(until)}
        async with self._in_time():
            reply = await read(self._client, "/billing/pods", query=query)
        body = parsed(BillRecords, reply)
        if body.pagination is not None and body.pagination.has_next:
            raise Unavailable("RunPod gave the bill in parts, which it was not known to do")
        now = datetime.fromtimestamp(time.time() + (reply.clock_offset_s or 0.0), UTC)
        return lines_of(body, since=since, until=until, now=now)

    async def balance(self) -> Balance:
        async with self._in_time():
            return await self._listing.balance()

    async def close(self) -> None:
        await self._client.close()

    # --- inside ---

    def _unsendable(self, attempt: Attempt, workload: Workload, offering: Offering) -> Rejection | None:
        price, ceiling = usd_per_hour(self.quote(workload, offering)), attempt.ceiling_usd_per_hour
        if price is not None and ceiling is not None and price > ceiling:
            message = f"{price:.4f} dollars an hour, disk included, is above the ceiling of {ceiling}"
            return Rejection(kind=RejectionKind.PRICE, message=message, scope=_shape(attempt, offering))
        if reason := self.validate(workload):
            return Rejection(kind=RejectionKind.INVALID, message=reason)
        return self._unplaceable(attempt.region, offering)

    def _unplaceable(self, region: str, offering: Offering) -> Rejection | None:
        """Why nothing of the offering can be had in these data centres.

        RunPod takes one that it does not have, and then places anywhere: that would be rented and returned
        again and again.
        """
        if region and offering.shape.startswith(orders.COMMUNITY):
            return _nowhere(offering, region)
        if missing := [each for each in orders.regions_of(region) if each not in self._centres]:
            return Rejection(
                kind=RejectionKind.UNSUPPORTED,
                message=f"RunPod has no data centre {', '.join(missing)}: correct the pool's regions",
                scope=BlockScope(region=region),
            )
        return None

    async def _accepted(self, attempt: Attempt, offering: Offering, reply: Reply) -> Accepted:
        try:
            pod = Pod.model_validate_json(reply.raw)
        except ValidationError as error:
            raise OutcomeUnknown("the create was answered with a body that cannot be read") from error
        if pod.reporter != attempt.identity:
            raise OutcomeUnknown(f"the create was answered with another pod, {pod.id}")
        state = state_of(pod)
        return Accepted(
            ref=self._ref(pod),
            account_id=self._parts.proven,
            reserved=state is not MachineState.QUEUED,
            meters=meters_of(pod, state=state, disk_usd=self._options.disk_usd),
            created_at=pod.created_at,
            clock_offset_s=reply.clock_offset_s,
            location=pod.data_center,
            unfit=self._misfit(pod, attempt, offering),
        )

    def _misfit(self, pod: Pod, attempt: Attempt, offering: Offering) -> Rejection | None:
        """Why the pod is not what was ordered: data centres are only a wish, and prices move."""
        scope = _shape(attempt, offering)
        wanted = offering.shape.removeprefix(orders.COMMUNITY)
        if pod.gpu is not None and pod.gpu.id and pod.gpu.id != wanted:
            message = f"RunPod gave {pod.gpu.id} instead of {wanted}"
            return Rejection(kind=RejectionKind.CAPACITY, message=message, scope=scope)
        count = offering.accelerator.count if offering.accelerator else 1
        if pod.gpu is not None and pod.gpu.count != count:
            message = f"RunPod gave {pod.gpu.count} cards instead of {count}"
            return Rejection(kind=RejectionKind.CAPACITY, message=message, scope=scope)
        allowed = orders.regions_of(attempt.region)
        if allowed and pod.data_center is not None and pod.data_center not in allowed:
            message = f"RunPod placed it in {pod.data_center}, which the pool does not allow"
            return Rejection(kind=RejectionKind.CAPACITY, message=message, scope=scope)
        listed = next((each.usd for each in offering.meters if each.kind is MeterKind.GPU), None)
        asked, ceiling = gpu_meter(pod).usd, attempt.ceiling_usd_per_hour
        if asked is not None and ceiling is not None and (listed is None or asked > listed):
            price = usd_per_hour(meters_of(pod, state=MachineState.RUNNING, disk_usd=self._options.disk_usd))
            if price is not None and price > ceiling:
                message = f"RunPod asks {price:.4f} dollars an hour, above the ceiling of {ceiling}"
                return Rejection(kind=RejectionKind.PRICE, message=message, scope=scope)
        return None

    def _machine(self, pod: Pod) -> Machine:
        return machine_of(
            pod,
            ref=self._ref(pod),
            disk_usd=self._options.disk_usd,
            end=self._listing.end_of(pod),
            trouble=self._listing.trouble_of(pod),
            image_failed=self._listing.image_failed(pod),
        )

    def _ref(self, pod: Pod) -> Ref:
        """Without a region: the data centre may be told late, and is `Machine.location`."""
        return Ref(provider=self._name, account=self._account, region="", resource_id=ResourceId(pod.id))

    async def _ask(self, method: str, ref: Ref) -> Reply | None:
        """A call about one pod; None only when RunPod itself says that there is no such pod."""
        reply = await call(self._client, method, f"/pods/{ref.resource_id}")
        if refusals.is_no_such_pod(reply):
            return None
        if not reply.ok:
            raise refusals.failure(reply)
        return reply

    def _in_time(self) -> InTime:
        return InTime(self._traits.call_timeout_s)


_factory: ProviderFactory = RunPod
_provider: type[Provider] = RunPod
_prepares: type[Prepares] = RunPod
_chooses: type[Chooses] = RunPod
_completes: type[CompletesByOption] = RunPod
_restarts: type[Restarts] = RunPod
_logs: type[StreamsLogs] = RunPod
_ssh: type[ReachableBySsh] = RunPod
_has_parts: type[HasParts] = RunPod
_bills: type[Bills] = RunPod
_balance: type[HasBalance] = RunPod


def _zulu(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _key(offering: Offering) -> str:
    return offering.accelerator.key if offering.accelerator else ""


def _shape(attempt: Attempt, offering: Offering) -> BlockScope:
    return BlockScope(accelerator=_key(offering), tier=attempt.tier, region=attempt.region)


def _nowhere(offering: Offering, region: str) -> Rejection:
    return Rejection(
        kind=RejectionKind.UNSUPPORTED,
        message="RunPod's community hosts cannot be had by region: take regions off the pool's entry,"
        " or option cloud=community off the Pod",
        scope=BlockScope(accelerator=_key(offering), region=region),
    )
