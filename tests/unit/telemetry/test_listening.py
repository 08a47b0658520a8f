"""Where we and the simulated clouds listen."""

import socket
from collections.abc import Callable

import pytest

from app.admission import server
from app.telemetry import health
from providers.simulation.sockets import listening


@pytest.mark.parametrize(
    "made",
    [
        lambda: health.bind("127.0.0.1:0"),
        lambda: health.bind(":0"),
        lambda: server.bind("127.0.0.1:0"),
        lambda: listening("127.0.0.1", 0),
        lambda: listening("*", 0),
    ],
    ids=["kubelet", "kubelet everywhere", "webhooks", "cloud", "cloud everywhere"],
)
def test_an_answer_of_two_packets_does_not_wait_for_an_acknowledgement(
    made: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NEBULA_SIMULATOR_NODELAY", "1")  # the clouds only when they are asked
    with made() as waiting:
        waiting.listen(1)
        with socket.create_connection(("127.0.0.1", waiting.getsockname()[1]), timeout=5):
            accepted, _ = waiting.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
