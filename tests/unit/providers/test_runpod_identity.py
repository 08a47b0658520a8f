"""Whose a RunPod pod is, by its name and its environment."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from providers.runpod.wire import Pod


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("nb-abcdefghij-klmnop-1-1-x", True),
        ("nb-abcdefghij-klm", True),  # cut short by the cloud
        ("nb-abcdefghij-klmnop-1-1-x-migration", True),  # or added to
        ("", True),
        ("nb-", False),
        ("somebody's copy", False),
        ("nb-abcdefghij-klmnop-2-2-y", False),
    ],
)
def test_a_pods_name_and_environment_must_agree(name: str, ours: bool):
    identity = "nb-abcdefghij-klmnop-1-1-x"
    pod = Pod(id="p", name=name or None, status="RUNNING", env={"NEBULA_IDENTITY": identity})

    assert pod.identity == (identity if ours else None)


SENT = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("age", "sent", "maybe"),
    [
        (timedelta(0), SENT, True),
        (timedelta(seconds=-60), SENT, True),  # RunPod's clock is behind ours
        (timedelta(minutes=5), SENT, True),
        (timedelta(minutes=6), SENT, False),  # somebody's copy: our create was over long before
        (None, SENT, True),
        (timedelta(minutes=6), None, True),
    ],
)
def test_a_renamed_pod_may_be_ours_unless_it_is_younger_than_any_create(
    age: timedelta | None, sent: datetime | None, maybe: bool
):
    identity = "nb-abcdefghij-klmnop-1-1-x"
    env = {"NEBULA_IDENTITY": identity}
    if sent is not None:
        env["NEBULA_SENT"] = str(int(sent.timestamp()))
    fields: dict[str, Any] = {"id": "p", "name": "my favourite", "status": "RUNNING", "env": env}
    if age is not None:
        fields["createdAt"] = (SENT + age).isoformat()
    pod = Pod.model_validate(fields)

    assert pod.identity is None
    assert pod.maybe == (identity if maybe else None)


def test_a_pod_whose_name_agrees_is_no_maybe():
    identity = "nb-abcdefghij-klmnop-1-1-x"
    assert Pod(id="p", name=identity, status="RUNNING", env={"NEBULA_IDENTITY": identity}).maybe is None
    assert Pod(id="p", name="training", status="RUNNING").maybe is None
