"""The ways into a machine: through its cloud, to the address that the cloud names, or through its sshd."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.inventory.places import place_of
from app.kubelet.find import Target
from app.machines import ssh
from providers.base import Machine, NotOffered, Provider, Ref, Unavailable
from providers.capabilities import Dials, Pipe, ReachableBySsh, Session, SshAddress
from providers.pipes import PIECE_BYTES, TcpPipe

CONNECT_S = 10.0
FRESH_S = 5.0


async def address_of(target: Target) -> SshAddress | None:
    """Where the machine's sshd is; None when there is no machine.

    Raises:
        NotOffered: it has none.
        ProviderError: it cannot be told now.
    """
    if target.account is None or target.ref is None:
        raise Unavailable("it has no machine")
    provider: ReachableBySsh = target.provider
    await target.account.budget.take(Urgency.RENT)
    return await provider.ssh(target.ref)


async def command(
    target: Target, address: SshAddress | None, words: Sequence[str], *, stdin: bool, terminal: bool
) -> Session | None:
    """Run a command through the machine's sshd; None when there is no machine.

    Raises:
        ProviderError: it was not started.
    """
    if address is None or target.account is None:
        return None
    secret = target.account.machine_secret
    return await ssh.run(address, secret=secret, command=words, stdin=stdin, terminal=terminal)


class Way:
    """The way to one Pod's machine, for as long as a client holds it open.

    Where the cloud names an address it is asked anew now and then, and not for each connection: a browser
    makes hundreds, and the account's calls are for renting.
    """

    def __init__(self, target: Target, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._target, self._clock = target, clock
        self._machine: Machine | None = None
        self._asked_at = float("-inf")
        self._turn = asyncio.Lock()

    async def dial(self, port: int) -> Pipe:
        """A connection to the port.

        Raises:
            ProviderError: there is none, for the reason that it tells.
        """
        target = self._target
        if target.account is None or target.ref is None:
            raise Unavailable("it has no machine")
        provider = target.provider
        if isinstance(provider, Dials):
            await target.account.budget.take(Urgency.RENT)
            pipe = await provider.dial(target.ref, port=port)
            if pipe is None:
                raise Unavailable("its machine is gone")
            return pipe
        machine = await self._look(provider, target.account, target.ref)
        place = place_of(machine, port)
        if (place is None or place.base) and isinstance(provider, ReachableBySsh):
            with suppress(NotOffered):
                if (address := await address_of(target)) is None:
                    raise Unavailable("its machine is gone")
                return await ssh.dial(address, secret=target.account.machine_secret, port=port)
        if place is None:
            named = ", ".join(str(each.port) for each in machine.ports)
            raise Unavailable(f"the cloud opens {'only ' + named if named else 'no port of its machine'}")
        if place.base:
            raise Unavailable(f"the cloud serves it only as a web page, at {place.base}")
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(place.host, place.port, limit=4 * PIECE_BYTES)
        except OSError as error:
            self._asked_at = float("-inf")  # it may have another address by now
            if isinstance(error, TimeoutError):
                raise Unavailable("no answer") from None
            raise Unavailable(f"connect: {error.strerror or type(error).__name__}") from error
        return TcpPipe(reader, writer)

    async def _look(self, provider: Provider, account: Account, ref: Ref) -> Machine:
        async with self._turn:
            if self._clock() - self._asked_at >= FRESH_S:
                await account.budget.take(Urgency.RENT)
                self._machine, self._asked_at = await provider.get(ref), self._clock()
            if self._machine is None:
                raise Unavailable("its machine is gone")
            return self._machine
