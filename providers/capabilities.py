"""What a cloud may offer beyond `providers.base.Provider`, each part a Protocol found with ``isinstance``.

An adapter offers a capability by having its method, and leaves it out otherwise: no stub that answers "not
supported". The rules of the contract hold here, too:

* None (or ``NOT_FOUND``) is the cloud's own word that there is no such machine; "could not ask" is an error;
* every method may be called at any time, and repeated unless it says otherwise; what concerns a machine works
  with its `Ref` alone, after a restart and without a database;
* adapters do small things: what Kubernetes promises about logs and exec is honoured once, by the kubelet.

A cloud that rents bare VMs offers only `ReachableBySsh`; ``app/machines`` then serves `StreamsLogs`,
`Executes` and `Attaches` over that way, in these same shapes.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol, runtime_checkable

from providers.base import Completion, Meter, MeterKind, Offering, Ref, Rejection, ResourceId, Workload

# --- before the intent ---------------------------------------------------------------------------


@runtime_checkable
class Prepares(Protocol):
    """Does what is slow, or must be settled, before an intent to rent is written."""

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
        """Make sure of the parts that the create names, and pin everything that it looks up.

        The answer becomes `Attempt.pins`: an image's id, subnets, a template's version, the one offer of a
        market, a registry credential. Nothing is rented and nothing that bills is made. Parts are made once
        and found again (their names come from their content), so a repeat is harmless and a crash leaves only
        parts, which `HasParts` lists. A `Rejection` here costs no intent: nothing was sent.

        Raises:
            Unavailable, Throttled: ask again.
        """
        ...


@runtime_checkable
class Chooses(Protocol):
    """Sells one accelerator in several ways, and lets the workload's options say which of them may be."""

    def choose(self, workload: Workload, offerings: Sequence[Offering]) -> Sequence[Offering]:
        """Those of ``offerings`` that the workload's options allow, the one to rent first. Pure.

        They are all of one accelerator, tier and region, in the order of `Provider.offers`. An empty answer
        means that the options leave nothing there.
        """
        ...


@runtime_checkable
class CompletesByOption(Protocol):
    """Tells more of some workloads' ends than `Traits.completion` says: of those whose options ask for it."""

    def completion_of(self, workload: Workload) -> Completion:
        """What will be told of this workload's end. Pure; never less than the trait."""
        ...


# --- output and input ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """Some output, cut anywhere. ``stream`` is "stdout" or "stderr", None where the cloud mixes them."""

    data: bytes
    stream: str | None = None
    at: datetime | None = None


@runtime_checkable
class StreamsLogs(Protocol):
    """Shows what the workload has written."""

    async def logs(
        self, ref: Ref, *, follow: bool, since: datetime | None, tail_lines: int | None
    ) -> AsyncIterator[LogChunk] | None:
        """The output of the workload's last run, oldest first, from its first byte on.

        None when the cloud has no such machine, or no output of it.

        Where the cloud has dropped the beginning, the first chunk is a line that says so. ``since`` and
        ``tail_lines`` are hints: more may come than was asked for, never less. Without ``follow`` it ends
        with what exists now, also where the cloud keeps the stream open; with it, once the workload is over
        and all was delivered. A stream that broke ends in an error, not quietly.

        Raises:
            Unavailable, Throttled: nothing is known; while iterating, too.
        """
        ...


@runtime_checkable
class KeepsPreviousRun(Protocol):
    """Still has what the workload wrote before its last restart on the same machine."""

    async def previous_logs(self, ref: Ref) -> AsyncIterator[LogChunk] | None:
        """The output of the run before the last one, whole; None when the cloud has none.

        Raises:
            Unavailable, Throttled: nothing is known; while iterating, too.
        """
        ...


class Session(Protocol):
    """A running process with its streams. Iterate ``stdout`` and ``stderr`` at the same time."""

    @property
    def stdout(self) -> AsyncIterator[bytes]: ...

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        """Empty with a terminal, which merges both."""
        ...

    async def write(self, data: bytes) -> None:
        """Send to stdin; returns when it has left us."""
        ...

    async def end_input(self) -> None:
        """Close stdin; may be repeated."""
        ...

    async def resize(self, *, columns: int, rows: int) -> bool:
        """Tell the terminal its size. False where the cloud cannot: the session goes on."""
        ...

    async def wait(self) -> int:
        """The exit code, 128 plus the number for a signal.

        Raises:
            Unavailable: the way to the process broke; it may still run.
        """
        ...

    async def aclose(self) -> None:
        """Let go, ending the process where the cloud can. May be repeated; never raises."""
        ...


@runtime_checkable
class Executes(Protocol):
    """Runs further commands beside the workload."""

    async def exec(self, ref: Ref, command: Sequence[str], *, stdin: bool, terminal: bool) -> Session | None:
        """Start ``command`` once; None when the cloud has no such machine.

        Not to be repeated by the caller: each call is another process.

        Raises:
            Unavailable, Throttled: not started, or not known to be; a machine that does not run yet, too.
        """
        ...


@runtime_checkable
class Attaches(Protocol):
    """Joins the workload's own process."""

    async def attach(self, ref: Ref, *, stdin: bool, terminal: bool) -> Session | None:
        """The main process's streams from now on; None when the cloud has no such machine.

        ``aclose`` leaves, and does not end, the process. ``stdin`` and ``terminal`` are what the client has.
        What it sends reaches a workload that was ordered with `Workload.stdin`, and is dropped by any other;
        the end of it is an end for the process only under ``stdin_once`` without a terminal.

        Raises:
            Unavailable, Throttled: not attached.
        """
        ...


# --- ways in -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A URL for one port, and the bearer token that it wants; None where anybody with the URL may enter."""

    url: str
    token: str | None = field(default=None, repr=False)


@runtime_checkable
class Connects(Protocol):
    """Gives users a way to a container port through the cloud's own proxy."""

    async def connect(self, ref: Ref, *, port: int) -> Connection | None:
        """A way to ``port``; None when the cloud has no such machine. Each call may make another token.

        Raises:
            Unavailable, Throttled: ask again; a machine that cannot be connected to yet, too.
        """
        ...


class Pipe(Protocol):
    """One connection to a port, its two directions closed each on its own."""

    async def read(self) -> bytes:
        """What has come, as soon as something has; empty at the end.

        Raises:
            Unavailable: the connection broke.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Send; returns when it has left us, or the other side reads slowly.

        Raises:
            Unavailable: the connection broke.
        """
        ...

    async def end_output(self) -> None:
        """Nothing more will be written; may be repeated."""
        ...

    async def aclose(self) -> None:
        """Let go of both directions. May be repeated; never raises."""
        ...


@runtime_checkable
class Dials(Protocol):
    """Carries a byte stream to a port of the workload, where `Machine.ports` and ``endpoint`` name none."""

    async def dial(self, ref: Ref, *, port: int) -> Pipe | None:
        """A new connection to ``port``; None when the cloud has no such machine.

        Raises:
            Unavailable, Throttled: not connected: nobody listens there, or the machine does not run.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAddress:
    """Where sshd of a machine listens, and as whom to log in. Read anew each time: addresses change hands.

    ``identity`` is that of the attempt whose key it takes. ``variable`` is the one in the container's
    environment that holds it: a server whose host key nobody could install proves itself by telling it.
    """

    host: str
    port: int
    user: str
    identity: str
    variable: str


@runtime_checkable
class ReachableBySsh(Protocol):
    """Rents machines with an sshd that takes the attempt's key (`Access.ssh_public_key`)."""

    async def ssh(self, ref: Ref) -> SshAddress | None:
        """The address; None when the cloud has no such machine.

        The host is believed by the attempt's host key where we could install one, else by the identity that
        its container tells (`SshAddress.variable`), never by its address.

        Raises:
            NotOffered: this machine runs no sshd, since nobody asked for one.
            Unavailable, Throttled: ask again; a machine without an address yet, too.
        """
        ...


# --- while it runs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a machine uses at a moment of the provider's clock; None where the cloud does not say.

    ``cpu_cores`` is the rate of now, ``cpu_s`` the core-seconds since the workload began: a cloud has either.
    """

    at: datetime | None = None
    cpu_cores: float | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    gpu_percent: tuple[float, ...] = ()


@runtime_checkable
class ReportsUsage(Protocol):
    """Measures running machines."""

    async def usage(self, ref: Ref) -> Usage | None:
        """The latest measure; None when the cloud has no such machine. Old by as much as the cloud lags.

        Raises:
            Unavailable, Throttled: nothing is known.
        """
        ...


@runtime_checkable
class Restarts(Protocol):
    """Starts the workload again on the machine that it has."""

    async def restart(self, ref: Ref) -> bool:
        """Ask for one restart; False when the cloud has no such machine. Same id, same price, same disk.

        A repeat may restart once more: that it happened shows in `Machine.started_at` or the state. A restart
        that would first give up the GPU is not offered.

        Raises:
            OutcomeUnknown: it may happen.
            Unavailable, Throttled: it does not.
        """
        ...


@runtime_checkable
class Extends(Protocol):
    """Ends a machine by itself at a limit, and puts that off (`Traits.dead_man`)."""

    async def extend(self, ref: Ref) -> bool:
        """Let it live for another `ProviderConfig.dead_man_s` from now; False: there is no such machine.

        It never shortens a life, and never gives a limit to a machine that has none.

        Raises:
            Unavailable, Throttled: ask again, the limit stands.
        """
        ...


# --- what is there besides machines --------------------------------------------------------------


class PartKind(StrEnum):
    """What a machine may need besides itself."""

    KEY = "key"
    TEMPLATE = "template"
    SECURITY_GROUP = "security_group"
    REGISTRY_LOGIN = "registry_login"
    VOLUME = "volume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part at a cloud. ``ref.resource_id`` is the cloud's id of it, unique within its kind.

    ``identity`` is the raw name or tag, as with machines: a claim's own part carries the claim's identity,
    one that an installation shares among claims carries the installation and a hash of its content.
    """

    ref: Ref
    kind: PartKind
    identity: str | None
    created_at: datetime | None = None
    in_use: bool | None = None
    meters: tuple[Meter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRound:
    """One answer to `HasParts.parts` for one list region; the fields mean what they mean in `Round`."""

    region: str
    account_id: str | None
    parts: tuple[Part, ...]
    unknown: str | None = None
    calls: int = 1


class Dropped(StrEnum):
    """The answer to `HasParts.drop_part`."""

    ACCEPTED = "accepted"
    NOT_FOUND = "not_found"
    IN_USE = "in_use"  # ask again when the machine that uses it is gone


@runtime_checkable
class HasParts(Protocol):
    """Owns parts: they are listed and swept like machines."""

    async def parts(self, regions: frozenset[str]) -> Sequence[PartRound]:
        """Every part of the kinds that this adapter makes, ours or not, with the rules of `Provider.list`.

        Raises:
            Unavailable, Throttled: nothing is known of any region.
        """
        ...

    async def drop_part(self, part: Part) -> Dropped:
        """Delete one part; may be repeated. Never edits a shared list that others write, too.

        Raises:
            Unavailable, Throttled: ask again.
        """
        ...


# --- money ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    """One line of the cloud's own account of what it charged, for ``[start, end)`` of its clock.

    ``identity`` is our name where the bill carries it. ``final`` is False while the cloud may change it.
    """

    resource_id: ResourceId | None
    identity: str | None
    kind: MeterKind | None
    start: datetime
    end: datetime
    usd: Decimal
    final: bool = True


@runtime_checkable
class Bills(Protocol):
    """Tells afterwards what was charged; the truth that the ledger is compared with, never its source."""

    async def bill(self, *, since: datetime, until: datetime) -> Sequence[BillLine]:
        """Every whole line inside the window; a bucket that the window or the present cuts is left out.

        Raises:
            Unavailable, Throttled: nothing is known; half a bill is never returned.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Prepaid dollars left, with the cloud's own figures of burn and of its limit, where it has them."""

    usd: Decimal
    burn_usd_per_hour: Decimal | None = None
    limit_usd_per_hour: Decimal | None = None


@runtime_checkable
class HasBalance(Protocol):
    """Is paid in advance: at zero the cloud stops or destroys machines."""

    async def balance(self) -> Balance:
        """What is left now.

        Raises:
            Unavailable, Throttled: nothing is known; never read that as zero.
        """
        ...
