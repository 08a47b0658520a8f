"""The wire to RunPod: one aiohttp session, bounded calls, and what can be said about a call that broke.

Nothing is retried here. `NotSent` is raised only where no connection could be had at all, so that the request
provably never left; every other break is `NoAnswer`, after which the call may have had its effect. The user
agent is our own: the edge in front of the API refuses the usual Python ones with a page that is no answer.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import orjson

BODY_BYTES_MAX: Final = 102_400
"""A larger request is refused before anything else is looked at."""

_RETRY_S = 5.0  # where a 429 does not say how long
_RETRY_S_MAX = 3600.0
_TEXT_CHARS = 500
_LINE_BYTES_MAX = 1024 * 1024


class NotSent(Exception):
    """No connection: the request never left."""


class NoAnswer(Exception):
    """The connection broke, or time was up: the request may have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. ``problem`` is its text if it has the form of the API's own errors, None otherwise.

    So an answer of a proxy or of the edge is never taken for the API's word, whatever its status.
    """

    status: int
    raw: bytes
    problem: str | None
    retry_after_s: float
    clock_offset_s: float | None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and self.problem is None

    @property
    def said(self) -> str:
        """What to show people, in short."""
        text = self.problem or self.raw[:_TEXT_CHARS].decode(errors="replace")
        return " ".join(text.split())[:_TEXT_CHARS] or f"status {self.status}"


class RunPodClient:
    """``key`` is the API key; it is sent and never shown."""

    def __init__(self, *, url: str, graphql_url: str, key: str, timeout_s: float) -> None:
        """``url`` is the base without ``/v2``."""
        self._url = url.rstrip("/")
        self._graphql_url = graphql_url
        self._http = aiohttp.ClientSession(
            headers={
                "Authorization": f"Bearer {key}",
                "User-Agent": "nebula/0.1",
                "Accept": "application/json",
            },
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=100),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_LINE_BYTES_MAX,
        )
        self._offset_s = 0.0  # as the newest answer told it

    def now_s(self) -> float:
        """The cloud's clock, in seconds since 1970: what its own times may be compared with.

        Ours, until the first answer came.
        """
        return time.time() + self._offset_s

    async def call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None
    ) -> Reply:
        """One request to REST v2, one answer; ``path`` begins after ``/v2``.

        Raises:
            NotSent, NoAnswer: see there.
        """
        return await self._call(method, f"{self._url}/v2{path}", query=query, body=body)

    async def graphql(self, text: str, variables: Mapping[str, Any]) -> Reply:
        """One query of the older API, which goes away in 2027; errors of its own come with status 200.

        Raises:
            NotSent, NoAnswer: see there.
        """
        body = {"query": text, "variables": dict(variables)}
        return await self._call("POST", self._graphql_url, query=None, body=body)

    @asynccontextmanager
    async def events(
        self, path: str, *, query: Mapping[str, str], connect_s: float
    ) -> AsyncIterator["Reply | AsyncIterator[bytes]"]:
        """A stream of server-sent events: the data of each, or the answer that came instead.

        The server never ends it by itself. An end without our asking is a break.

        Raises:
            NotSent, NoAnswer: see there; the stream raises `NoAnswer`, too.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        headers = {"Accept": "text/event-stream"}
        url = f"{self._url}/v2{path}"
        try:
            async with self._http.get(url, params=query, headers=headers, timeout=timeout) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    raw = await response.read()
                    yield _reply(response, raw, began=time.time())
                else:
                    yield _data_of(response.content)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(f"GET {path}: no connection") from error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NoAnswer(f"GET {path}: {type(error).__name__}") from error

    async def close(self) -> None:
        await self._http.close()

    async def _call(self, method: str, url: str, *, query: Mapping[str, str] | None, body: Any) -> Reply:
        # Sorted, so that equal requests are the same bytes.
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        headers = {} if data is None else {"Content-Type": "application/json"}
        began = time.time()
        try:
            async with self._http.request(
                method, url, params=query, data=data, headers=headers, allow_redirects=False
            ) as response:
                raw = await response.read()
                reply = _reply(response, raw, began=began)
                if reply.clock_offset_s is not None:
                    self._offset_s = reply.clock_offset_s
                return reply
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(f"{method} {_path(url)}: no connection") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswer(f"{method} {_path(url)}: {type(error).__name__}") from error


async def _data_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event; comments and fields that we do not use are passed over."""
    data: list[bytes] = []
    async for line in content:
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data.clear()
    raise aiohttp.ClientPayloadError("the stream ended")


def _reply(response: aiohttp.ClientResponse, raw: bytes, *, began: float) -> Reply:
    return Reply(
        status=response.status,
        raw=raw,
        problem=_problem(response.status, raw),
        retry_after_s=_seconds(response.headers.get("Retry-After"), response.headers.get("Date")),
        clock_offset_s=_offset_s(response.headers.get("Date"), began=began, ended=time.time()),
    )


def _problem(status: int, raw: bytes) -> str | None:
    """The text of ``{"title", "status", "detail", "errors"}``; None for anything else.

    Where the body names a status other than the answer's, somebody between has changed one of them; only a
    body that says error under a success is believed, since nothing of use can be in it.
    """
    if b'"status"' not in raw or (status < 300 and b'"title"' not in raw):
        return None
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("status"), int):
        return None
    if "title" not in body or (status >= 300 and body["status"] != status):
        return None
    errors = body.get("errors")
    texts = [body.get("detail") or body["title"], *(errors if isinstance(errors, list) else ())]
    return "; ".join(str(text) for text in texts if text)[:_TEXT_CHARS]


def _seconds(retry_after: str | None, date: str | None) -> float:
    """Retry-After in seconds, which may also be a date; it is counted from the answer's own."""
    try:
        seconds = float(retry_after or _RETRY_S)
    except ValueError:
        try:
            until = parsedate_to_datetime(retry_after or "").timestamp()
            now = parsedate_to_datetime(date).timestamp() if date else time.time()
        except ValueError:
            return _RETRY_S
        seconds = until - now
    return min(max(seconds, 0.0), _RETRY_S_MAX)


def _offset_s(date: str | None, *, began: float, ended: float) -> float | None:
    """The cloud's clock minus ours; the header's whole second counts as its middle."""
    try:
        said = parsedate_to_datetime(date or "")
    except ValueError:
        return None
    return said.timestamp() + 0.5 - (began + ended) / 2


def _path(url: str) -> str:
    return url.partition("//")[2].partition("/")[2]
