"""Whose a RunPod pod is, by its name and its environment."""

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
