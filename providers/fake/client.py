"""The wire to a fake cloud: one aiohttp session, bounded calls, and what can be said about a call that broke.

Nothing is retried here. `NotSent` is raised only where no connection could be had at all, so that the request
provably never left; every other break is `NoAnswer`, after which the call may have had its effect.
"""

import time
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson


class NotSent(Exception):
    """No connection: the request never left."""


class NoAnswer(Exception):
    """The connection broke, or time was up: the request may have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``code`` is the cloud's own word for an error, "" if it gave none. ``raw`` is the body as it came."""

    status: int
    raw: bytes
    code: str
    message: str
    host: str | None
    retry_after_s: float
    clock_offset_s: float | None

    @property
    def ok(self) -> bool:
        """A success by its status and by its body: this cloud may put an error into a 200."""
        return self.status < 300 and not self.code


class FakeClient:
    """``token`` is the credential; it is sent and never shown."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._url = url.rstrip("/")
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=200),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> Reply:
        """One request, one answer.

        Raises:
            NotSent, NoAnswer: see there.
        """
        # Sorted, so that the same attempt sent again is the same bytes.
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        began = time.time()
        try:
            async with self._http.request(method, self._url + path, params=query, data=data) as response:
                raw = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(f"{method} {path}: no connection") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswer(f"{method} {path}: {type(error).__name__}") from error
        fault = _error_of(raw)
        return Reply(
            status=response.status,
            raw=raw,
            code=str(fault.get("code") or ""),
            message=str(fault.get("message") or f"status {response.status}")[:500],
            host=fault.get("host"),
            retry_after_s=_seconds(response.headers.get("Retry-After")),
            clock_offset_s=_offset_s(response.headers.get("Date"), began=began, ended=time.time()),
        )

    async def close(self) -> None:
        await self._http.close()


def _error_of(raw: bytes) -> dict[str, Any]:
    if b'"error"' not in raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    fault = body.get("error") if isinstance(body, dict) else None
    return fault if isinstance(fault, dict) else {}


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 1.0), 0.0), 3600.0)
    except ValueError:
        return 1.0


def _offset_s(date: str | None, *, began: float, ended: float) -> float | None:
    """The cloud's clock minus ours; the header's whole second counts as its middle."""
    try:
        said: datetime = parsedate_to_datetime(date or "")
    except ValueError:
        return None
    return said.timestamp() + 0.5 - (began + ended) / 2
