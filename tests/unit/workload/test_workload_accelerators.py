"""The accelerator of a Pod: type from the label, count from the containers."""

import pytest
from workload_makers import a_container, a_pod

from app.workload import BadRequest, accelerator_of
from providers.base import Accelerator

TYPE = "nebula.inftyai.com/accelerator-type"
GPU = "nvidia.com/gpu"


def asking(*, limits=None, requests=None, name="main"):
    parts = {"limits": limits, "requests": requests}
    return a_container(
        name=name, resources={part: {GPU: amount} for part, amount in parts.items() if amount is not None}
    )


@pytest.mark.behaviour(16, 17, 18, 20, 21, 22)
@pytest.mark.parametrize(
    ("label", "containers", "accelerator"),
    [
        (None, [asking()], None),
        (None, [asking(limits="0")], None),
        ("H100", [asking(limits="8")], ("H100", 8)),
        (" h100 ", [asking(limits=8)], ("h100", 8)),
        ("h100", [asking()], ("h100", 1)),
        ("h100", [asking(requests="2")], ("h100", 2)),
        ("h100", [asking(limits="4", requests="2")], ("h100", 4)),
        ("h100", [asking(limits="2"), asking(limits="4", name="b"), asking(name="c")], ("h100", 4)),
    ],
    ids=[
        "16-neither",
        "16-zero-of-nothing",
        "17-casing-kept",
        "blanks-dropped",
        "18-no-count",
        "20-request-only",
        "21-limit-wins",
        "22-maximum",
    ],
)
def test_type_and_count_are_read_as_the_api_says(label, containers, accelerator):
    pod = a_pod(*containers, labels={TYPE: label} if label else {})

    expected = Accelerator(type=accelerator[0], count=accelerator[1]) if accelerator else None
    assert accelerator_of(pod) == expected


@pytest.mark.parametrize(
    ("label", "containers", "words"),
    [
        (None, [asking(limits="8")], "without a type"),
        ("h100", [asking(limits="0")], "at least 1"),
        ("h100", [asking(limits="500m")], "limits of nvidia.com/gpu"),
        ("h100", [asking(requests="-1")], "requests of nvidia.com/gpu"),
        ("h100", [asking(limits="many")], "no quantity"),
    ],
    ids=["19-count-without-type", "zero-of-a-type", "fraction", "negative", "no-quantity"],
)
def test_a_count_that_makes_no_sense_is_a_bad_request(label, containers, words):
    pod = a_pod(*containers, labels={TYPE: label} if label else {})

    with pytest.raises(BadRequest, match=words):
        accelerator_of(pod)


@pytest.mark.behaviour(23)
def test_23_init_containers_are_not_read():
    pod = a_pod(labels={TYPE: "h100"}, initContainers=[asking(limits="8")])

    assert accelerator_of(pod) == Accelerator(type="h100", count=1)
