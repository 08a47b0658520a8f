"""The Secrets that hold clouds' credentials, beside the Lease. Each entry is called as its cloud's variable.

An account's Secret is ``nebula-PROVIDER`` (``nebula-PROVIDER-ACCOUNT`` where the account is not ``default``);
``aibrix-neocloud-node-ADAPTER`` of earlier installations serves the default account where that is not there.
A Secret is read each time: a credential that was changed is in use without a restart.
"""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterator, Mapping
from typing import Final

import structlog

from app.kube import paths
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.settings import ProviderEntry
from providers.base import DEFAULT_ACCOUNT

log = structlog.get_logger()

_EARLIER: Final = "aibrix-neocloud-node-"


def secret_names(entry: ProviderEntry) -> Iterator[str]:
    """Where an account's credentials may be, in the order of looking."""
    if entry.account != DEFAULT_ACCOUNT:
        yield f"nebula-{entry.name}-{entry.account}"
        return
    yield f"nebula-{entry.name}"
    yield f"{_EARLIER}{entry.adapter}"


class CredentialSecrets:
    """Of one namespace."""

    def __init__(self, kube: Kube, *, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace

    async def of(self, entry: ProviderEntry) -> Mapping[str, str] | None:
        """The entries of the first Secret that is there, {} when none is; None when it cannot be told."""
        for name in secret_names(entry):
            try:
                secret = await self._kube.find(paths.secret(self._namespace, name))
            except KubeError as error:
                log.warning("credentials cannot be read", secret=name, error=str(error))
                return None
            if secret is None:
                continue
            try:
                return {key: b64decode(text).decode() for key, text in (secret.get("data") or {}).items()}
            except (NotBase64, UnicodeDecodeError):
                log.warning("credentials cannot be read", secret=name, error="an entry is no text")
                return None
        return {}
