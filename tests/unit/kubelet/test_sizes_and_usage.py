"""Terminal sizes out of a torn stream; the pages that metrics-server reads; who a certificate is."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.kubelet import usage
from app.kubelet.callers import of_certificate
from app.kubelet.channels import Sizes
from app.kubelet.forward import ports
from app.kubelet.usage import Sample

AT = datetime(2030, 1, 1, tzinfo=UTC)


def test_fc_114_sizes_come_in_any_pieces_and_no_size_is_ignored():
    sizes = Sizes()
    assert sizes.feed(b'{"Width":80,"Hei') is None
    assert sizes.feed(b'ght":24}\n{"Width":100,"Height":30}\n') == (100, 30)
    assert sizes.feed(b'{"Width":0,"Height":0}') is None
    assert sizes.feed(b'nonsense}{"Width":"x"}{"Width":7}') is None
    assert sizes.feed(b'{"Width":132,"Height":50}') == (132, 50)


@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_fc_114_whatever_comes_as_a_size_is_bounded(pieces: list[bytes]):
    sizes = Sizes()
    for piece in pieces:
        sizes.feed(piece)
        assert len(sizes._buffer) <= 4096


def sample(pod: str, *, cpu_s: float = 1.5, memory_bytes: int = 1000) -> Sample:
    return Sample(
        namespace="ns",
        pod=pod,
        pod_uid=f"uid-{pod}",
        container="work",
        started_at=AT,
        at=AT,
        cpu_s=cpu_s,
        cpu_cores=0.5,
        memory_bytes=memory_bytes,
    )


def test_a_page_has_the_series_that_metrics_server_reads_with_the_time_of_the_measure():
    lines = usage.exposition([sample("a"), sample("b", cpu_s=2.0, memory_bytes=24)]).splitlines()

    stamp = round(AT.timestamp() * 1000)
    labels = 'container="work",namespace="ns",pod="a"'
    assert f"container_cpu_usage_seconds_total{{{labels}}} 1.5 {stamp}" in lines
    assert f"container_memory_working_set_bytes{{{labels}}} 1000 {stamp}" in lines
    assert f"container_start_time_seconds{{{labels}}} {AT.timestamp():.15g}" in lines
    assert f"node_cpu_usage_seconds_total 3.5 {stamp}" in lines
    assert f"node_memory_working_set_bytes 1024 {stamp}" in lines


def test_a_node_without_a_measure_has_no_figures_and_never_a_zero():
    page = usage.exposition([])
    assert "node_" not in page
    assert "container_" not in page
    assert usage.summary("n", []) == {"node": {"nodeName": "n"}, "pods": []}


def test_a_summary_names_each_pod():
    (pod,) = usage.summary("n", [sample("a")])["pods"]
    assert pod["podRef"] == {"name": "a", "namespace": "ns", "uid": "uid-a"}
    assert pod["containers"][0]["cpu"]["usageCoreNanoSeconds"] == 1_500_000_000
    assert pod["containers"][0]["cpu"]["usageNanoCores"] == 500_000_000


def test_a_certificate_names_a_user_and_its_groups():
    subject = (
        (("organizationName", "system:masters"),),
        (("organizationName", "b"),),
        (("commonName", "x"),),
    )
    caller = of_certificate({"subject": subject})
    assert caller is not None
    assert (caller.name, caller.groups) == ("x", ("system:masters", "b"))
    assert of_certificate({"subject": ((("organizationName", "b"),),)}) is None


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["80"], [80]),
        (["80,81", "82"], [80, 81, 82]),
        (["0"], None),
        (["65536"], None),
        (["x"], None),
        ([], None),
        (["80,"], None),
    ],
)
def test_ports_are_from_1_to_65535(texts: list[str], found: list[int] | None):
    assert ports(texts) == found
