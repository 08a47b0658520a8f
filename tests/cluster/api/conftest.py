"""kubectl against the session's real API server, with our CRDs applied as they are shipped."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from app.api.crds import load_crds
from tests.support.cluster import Kubectl

PUBLISHED_WITHIN_S = 60.0


class Api:
    """What people get who use kubectl. `run` gives its output; `refused` what the API server said instead."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def run(self, *arguments: str, obj: Any = None) -> str:
        return self._kubectl(*arguments, stdin=_text(obj))

    def json(self, *arguments: str, obj: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run(*arguments, "-o", "json", obj=obj))
        return answer

    def refused(self, *arguments: str, obj: Any = None) -> str:
        done = self._kubectl.run(*arguments, stdin=_text(obj))
        assert done.returncode != 0, f"was accepted: {done.stdout}"
        return done.stderr

    def create(self, obj: dict[str, Any], *, dry: bool = False) -> dict[str, Any]:
        return self.json("create", "-f", "-", *(["--dry-run=server"] if dry else []), obj=obj)

    def published(self, *arguments: str) -> str:
        """The output of a command that needs the OpenAPI document, which comes a while after the CRD."""
        deadline = time.monotonic() + PUBLISHED_WITHIN_S
        while (done := self._kubectl.run(*arguments)).returncode != 0:
            assert time.monotonic() < deadline, done.stderr
        return done.stdout


def _text(obj: Any) -> str | None:
    return None if obj is None else yaml.safe_dump(obj)


@pytest.fixture(scope="session")
def api(kubectl: Kubectl) -> Api:
    """A cluster that serves our kinds."""
    crds = load_crds()
    kubectl(
        *("apply", "--server-side", "--force-conflicts", "-f", "-"),
        stdin=yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": crds}),
    )
    names = [f"crd/{crd['metadata']['name']}" for crd in crds]
    kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    return Api(kubectl)


@pytest.fixture
def made(api: Api) -> Iterator[list[str]]:
    """Objects, as ``kind name`` arguments of kubectl, that go when the test is over."""
    objects: list[str] = []
    yield objects
    for each in reversed(objects):
        api.run("delete", "--ignore-not-found", "--wait=false", *each.split())
