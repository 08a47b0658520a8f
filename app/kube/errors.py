"""What the API server refused, named after what the caller may do next.

The server's own words decide: an HTTP status alone cannot tell "this object is not the one you mean any
more" (`Replaced`) from "it changed since you read it" (`Conflict`). The answers that are matched here were
seen on 1.36 and are proven against a real server by ``tests/cluster/kube/test_errors.py``. Two are not
decided here, since the answer does not tell: a failed ``test`` of a JSON patch is a bare 422, and an old
version hides a wrong UID behind it. There the client looks again.
"""

import re
from typing import Any

import orjson

# Worded differently by the check before a delete and by the one inside the storage's transaction.
_UID_PRECONDITION = re.compile(r"\bUID in (the )?precondition\b")

MESSAGE_CHARS = 256  # messages reach logs and conditions; bodies may quote whole objects


class KubeError(Exception):
    """The API server refused a request. ``status`` is the HTTP status that it gave."""

    def __init__(
        self, status: int, *, reason: str = "", message: str = "", details: dict[str, Any] | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message[:MESSAGE_CHARS]
        self.details = details or {}
        super().__init__(f"{status} {reason}: {self.message}")


class Replaced(KubeError):
    """The object that the caller means is not there: gone, or another one has its name. Drop the work.

    Raised for a 404 that names the object, a DELETE or PATCH whose UID is not the living object's, and a JSON
    patch whose ``test`` of ``/metadata/uid`` failed. A 404 for the whole resource (its CRD is absent) is a
    plain `KubeError`: it says nothing about one object.
    """


class Conflict(KubeError):
    """The object has changed since it was read: read it again, decide again. Nothing was written."""


class Exists(KubeError):
    """A create found an object of that name. Nothing was written."""


class Expired(KubeError):
    """The server has forgotten that resource version or continue token: list again."""


class Unreachable(KubeError):
    """No answer: never connected, broken off, or too late. A write may have taken effect. ``status`` is 0."""

    def __init__(self, message: str) -> None:
        super().__init__(0, reason="Unreachable", message=message)

    def __str__(self) -> str:
        return self.message


def from_response(method: str, status: int, body: bytes) -> KubeError:
    """The error for a response of ``status``, its ``body`` being a Status object or any other text."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict) or parsed.get("kind") != "Status":
        return KubeError(status, message=body[: 4 * MESSAGE_CHARS].decode(errors="replace").strip())
    return from_status(parsed, method=method, status=status)


def from_status(answer: dict[str, Any], *, method: str = "", status: int | None = None) -> KubeError:
    """The error for a Status object, from a response body or from inside a watch."""
    code = status or int(answer.get("code") or 500)
    reason = answer.get("reason") or ""
    message = answer.get("message") or ""
    details = answer.get("details") or {}
    about_uid = any(cause.get("field") == "metadata.uid" for cause in details.get("causes") or ())
    kind = _kind(method, code, reason=reason, message=message, named="name" in details, about_uid=about_uid)
    return kind(code, reason=reason, message=message, details=details)


def _kind(
    method: str, code: int, *, reason: str, message: str, named: bool, about_uid: bool
) -> type[KubeError]:
    match code:
        case 404 if named and method != "POST":
            return Replaced
        case 409 if reason == "AlreadyExists":
            return Exists
        case 409 if _UID_PRECONDITION.search(message):
            return Replaced
        case 409 if reason == "Conflict":
            return Conflict
        case 410:
            return Expired
        case 422 if about_uid:
            return Replaced
        case _:
            return KubeError
