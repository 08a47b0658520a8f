"""Keeps the end of a workload's output before its machine is given back: ``kubectl logs`` of a finished Job.

Asked for once, and never for long: a machine that costs money waits for nobody's output. Without the store,
or with a cloud that does not answer, there is none.
"""

import asyncio

import structlog

from app.inventory.accounts import Account
from app.inventory.budget import Urgency
from app.machines.tail import gather, packed
from app.provisioning.core import Core
from app.provisioning.lives import Life
from app.store import outputs
from app.store.engine import StoreUnavailable, begin
from providers.base import ProviderError
from providers.capabilities import StreamsLogs

log = structlog.get_logger()
PATIENCE_S = 5.0


async def save_tail(core: Core, life: Life, account: Account) -> None:
    """Read and keep it, once for each claim of this process."""
    provider, ref, settings = account.provider, life.ref, core.settings
    ended = ref is not None and ref.resource_id in life.terminated
    if life.tail_tried or ref is None or ended or not isinstance(provider, StreamsLogs):
        return
    life.tail_tried = True
    try:
        async with asyncio.timeout(PATIENCE_S):
            await account.budget.take(Urgency.TERMINATE)
            # A line has a byte at least: so many lines are never fewer than are kept.
            lines = settings.output_tail_bytes
            stream = await provider.logs(ref, follow=False, since=None, tail_lines=lines)
            if stream is None:
                return
            chunks = await gather(stream, limit_bytes=settings.output_tail_bytes)
        if not chunks:
            return
        records = await asyncio.to_thread(packed, chunks)
        async with begin(core.engine) as conn:
            await outputs.save(
                conn,
                pod_uid=life.claim.pod_uid,
                claim_uid=life.claim.uid,
                records=records,
                limit_bytes=settings.output_total_bytes,
            )
    except (ProviderError, TimeoutError, StoreUnavailable) as error:
        why = str(error)[:200] or type(error).__name__
        log.info("output not kept", resource=ref.resource_id, why=why)
    else:
        log.info("output kept", resource=ref.resource_id, size_bytes=len(records))
