"""The way to a port of a machine: through its cloud, or to the address that the cloud names."""

import asyncio

from app.inventory.budget import Urgency
from app.inventory.places import place_of
from app.kubelet.find import Target
from providers.base import Machine, Unavailable
from providers.capabilities import Dials, Pipe
from providers.pipes import PIECE_BYTES, TcpPipe

CONNECT_S = 10.0


async def dial(target: Target, port: int) -> Pipe:
    """A connection to the port.

    Raises:
        ProviderError: there is none, for the reason that it tells.
    """
    if target.account is None or target.ref is None:
        raise Unavailable("it has no machine")
    provider, account = target.provider, target.account
    await account.budget.take(Urgency.RENT)
    if isinstance(provider, Dials):
        pipe = await provider.dial(target.ref, port=port)
        if pipe is None:
            raise Unavailable("its machine is gone")
        return pipe
    machine: Machine | None = await provider.get(target.ref)
    if machine is None:
        raise Unavailable("its machine is gone")
    place = place_of(machine, port)
    if place is None:
        named = ", ".join(str(each.port) for each in machine.ports)
        raise Unavailable(f"the cloud opens {'only ' + named if named else 'no port of its machine'}")
    if place.base:
        raise Unavailable(f"the cloud serves it only as a web page, at {place.base}")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(place.host, place.port, limit=4 * PIECE_BYTES)
    except TimeoutError:
        raise Unavailable("no answer") from None
    except OSError as error:
        raise Unavailable(f"connect: {error.strerror or type(error).__name__}") from error
    return TcpPipe(reader, writer)
