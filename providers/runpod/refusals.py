"""What an answer of RunPod that is no success means. Pure.

REST v2 has no machine-readable codes: a status says several things, and the text in the API's own form of
error (`client.Reply.problem`) tells them apart. An answer without that form comes from something in between
and proves nothing. The texts were recorded from the live API in 2026; `CAPACITY` can be added to in the
configuration (option ``capacity_texts``), since a text that is missing here makes a full card look like a
wrong request.
"""

from collections.abc import Sequence
from typing import Final

from providers.base import (
    BlockScope,
    CredentialRejected,
    ProviderError,
    Rejection,
    RejectionKind,
    Throttled,
    Tier,
    Unavailable,
)
from providers.runpod.client import Reply

CAPACITY: Final = (
    "no longer any instances available",
    "no instances available",
    "no instances currently available",
    "does not have the resources to deploy your pod",
    "not enough free gpus",
    "insufficient resources",
)
_QUOTA = ("balance is too low", "insufficient balance", "add funds", "spend limit", "spending limit", "quota")
_KEY_REFUSED = ("access denied", "api key", "unauthorized", "suspended", "forbidden")
_NO_POD = ("pod not found",)


def refusal(
    reply: Reply, *, accelerator: str, region: str, tier: Tier, capacity: Sequence[str] = CAPACITY
) -> Rejection | None:
    """The refusal that a create's answer proves; None when it proves nothing. 429 is not for here.

    ``accelerator`` is ``type:count``. Whatever is above 499 proves nothing, whatever its text says: older
    servers have made the pod and then failed to show it.
    """
    text = reply.problem
    if text is None or not 400 <= reply.status < 500:
        return None
    lower = text.lower()
    shape = BlockScope(accelerator=accelerator, tier=tier, region=region)
    everything = BlockScope(everything=True)
    match reply.status:
        case 401:
            return _rejection(RejectionKind.AUTH, text, everything)
        case 403 if _says(lower, _KEY_REFUSED):
            return _rejection(RejectionKind.AUTH, text, everything)
        case 403:
            return _rejection(RejectionKind.UNSUPPORTED, text, shape)
        case 402:
            return _rejection(RejectionKind.QUOTA, text, everything)
        case 400 | 404 | 409 | 422 if _says(lower, _QUOTA):
            return _rejection(RejectionKind.QUOTA, text, everything)
        case 400 | 409 if _says(lower, capacity):
            return _rejection(RejectionKind.CAPACITY, text, shape)
        case 400 | 404 | 413 | 422:
            return _rejection(RejectionKind.INVALID, text, None)
        case _:
            return None


def is_no_such_pod(reply: Reply) -> bool:
    """The API's own word that there is no such pod. A bare 404 is not."""
    return reply.status == 404 and reply.problem is not None and _says(reply.problem.lower(), _NO_POD)


def failure(reply: Reply) -> ProviderError:
    """The error for an answer to a read or a terminate that cannot be used."""
    if reply.status == 429:
        return Throttled(reply.retry_after_s, reply.said)
    if reply.problem is not None and (
        reply.status == 401 or (reply.status == 403 and _says(reply.problem.lower(), _KEY_REFUSED))
    ):
        return CredentialRejected(f"RunPod does not accept the API key: {reply.said}")
    if reply.status == 403 and b"error code: 1010" in reply.raw:
        return Unavailable("the edge in front of RunPod's API refuses our user agent (error code: 1010)")
    if reply.status == 410:
        return Unavailable(f"this API is retired: {reply.said}")
    return Unavailable(f"the answer was {reply.status}: {reply.said}")


def _rejection(kind: RejectionKind, text: str, scope: BlockScope | None) -> Rejection:
    return Rejection(kind=kind, message=f"RunPod: {text}", scope=scope)


def _says(lower: str, texts: Sequence[str]) -> bool:
    return any(text.lower() in lower for text in texts)
