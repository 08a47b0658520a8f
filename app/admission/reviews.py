"""Admission reviews over HTTP: one parse, one verdict, one answer.

A review that cannot be understood is answered with status 400 and a reason, never with "allowed". Nothing of
an object but its namespace and name is logged: a Pod's environment holds secrets.
"""

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.admission import pools, rules, spelling
from app.admission.rules import Verdict
from app.api.keys import (
    GROUP,
    NODE_POOL,
    NODE_POOL_VALIDATING_PATH,
    POD_MUTATING_PATH,
    POD_VALIDATING_PATH,
    POD_WARNING_PATH,
)
from catalog.stock import Stock

log = structlog.get_logger()

REVIEW_API_VERSION = "admission.k8s.io/v1"
BODY_BYTES_MAX = (
    3 * 1024 * 1024
)  # twice what the API server can store: a review may carry the old object, too
_DENIED = 403


class BadReview(ValueError):
    """The body is no admission review for this path; the message says why."""


class TooLarge(ValueError):
    """The body is larger than any review of an object that could be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The request of an admission review, reduced to what the rules need."""

    uid: str
    operation: str
    subresource: str
    namespace: str
    name: str
    obj: dict[str, Any]


Judge = Callable[[Review], Verdict]


def application(*, stock: Stock) -> Starlette:
    """The web application. ``stock`` says, at each call, what could be rented."""

    def judge_new_pod(review: Review) -> Verdict:
        """Only about Pods being created."""
        if review.operation != "CREATE" or review.subresource:
            return rules.ALLOWED
        return rules.mutate(review.obj, stock=stock)

    def judge_final_pod(review: Review) -> Verdict:
        """About Pods being created, and about what may be done to one."""
        if review.subresource:
            return rules.validate_subresource(review.obj, subresource=review.subresource)
        return rules.validate(review.obj, stock=stock) if review.operation == "CREATE" else rules.ALLOWED

    def judge_bystander(review: Review) -> Verdict:
        """Only about Pods that are not opted in, and only to warn."""
        return Verdict(warnings=tuple(spelling.not_opted_in(review.obj["metadata"])))

    def judge_pool(review: Review) -> Verdict:
        return pools.warn_of_pool(review.obj, stock=stock)

    return Starlette(
        routes=[
            _route(POD_MUTATING_PATH, judge_new_pod, group="", kind="Pod"),
            _route(POD_VALIDATING_PATH, judge_final_pod, group="", kind="Pod"),
            _route(POD_WARNING_PATH, judge_bystander, group="", kind="Pod"),
            _route(NODE_POOL_VALIDATING_PATH, judge_pool, group=GROUP, kind=NODE_POOL),
        ]
    )


def parsed(body: bytes, *, group: str, kind: str) -> Review:
    """The review in a request's body.

    Raises:
        BadReview: it is not JSON, no review of our version, or about another kind of object.
    """
    try:
        review = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadReview("the body is not JSON") from error
    match review:
        case {"apiVersion": str(version), "kind": "AdmissionReview", "request": {"uid": str(uid)} as request}:
            if version != REVIEW_API_VERSION:
                raise BadReview(f"an AdmissionReview of {version}, not of {REVIEW_API_VERSION}")
        case _:
            raise BadReview("the body is no AdmissionReview with a request that has a uid")
    match request:
        case {"kind": {"group": str(found_group), "kind": str(found)}, "object": {"metadata": dict()} as obj}:
            if (found_group, found) != (group, kind):
                raise BadReview(f"about a {found}, not about a {kind}")
        case _:
            raise BadReview("the request names no kind, or carries no object")
    if not isinstance(obj.get("spec"), dict):
        raise BadReview(f"the {kind} has no spec")
    metadata = obj["metadata"]
    return Review(
        uid=uid,
        operation=str(request.get("operation") or ""),
        subresource=str(request.get("subResource") or ""),
        namespace=str(request.get("namespace") or ""),
        name=str(request.get("name") or metadata.get("name") or metadata.get("generateName") or ""),
        obj=obj,
    )


def answer(review: Review, verdict: Verdict) -> bytes:
    """The review that goes back."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": not verdict.refusals}
    if verdict.refusals:
        message = "; ".join(verdict.refusals)
        response["status"] = {"code": _DENIED, "reason": "Forbidden", "message": message}
    elif verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(orjson.dumps(verdict.patch)).decode()
    if verdict.warnings:
        response["warnings"] = verdict.warnings
    return orjson.dumps({"apiVersion": REVIEW_API_VERSION, "kind": "AdmissionReview", "response": response})


def _route(path: str, judge: Judge, *, group: str, kind: str) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            review = parsed(await _body(request), group=group, kind=kind)
        except BadReview as error:
            log.warning("review not understood", path=path, error=str(error))
            return PlainTextResponse(f"{error}\n", status_code=400)
        except TooLarge as error:
            log.warning("review too large", path=path)
            return PlainTextResponse(f"{error}\n", status_code=413)
        about = {"kind": kind, "namespace": review.namespace, "name": review.name}
        try:
            verdict = judge(review)
        except Exception as error:
            log.error("review failed", **about, error=type(error).__name__, at=_place(error))
            return PlainTextResponse("the review failed; see the controller's log\n", status_code=500)
        if verdict.refusals:
            log.info("refused", **about, operation=review.operation, reasons=list(verdict.refusals))
        return Response(answer(review, verdict), media_type="application/json")

    return Route(path, _Endpoint(endpoint), methods=["POST"])


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A handler as an ASGI application of its own: a review needs nothing that the wrapper would add."""

    handle: Callable[[Request], Awaitable[Response]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self.handle(Request(scope, receive))
        await response(scope, receive, send)


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise TooLarge(f"a review has at most {BODY_BYTES_MAX} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _place(error: Exception) -> str:
    """Where it was raised. Not what it says, which may hold a value of the object."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
