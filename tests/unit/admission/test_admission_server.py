"""Where the webhooks listen, and the URL that the API server is told."""

import socket

import pytest

from app.admission.configurations import certificate_names, with_port
from app.admission.server import bind


@pytest.mark.parametrize(
    ("address", "reached_at"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        (":0", "127.0.0.1"),
        ("[::]:0", "127.0.0.1"),
        ("localhost:0", "127.0.0.1"),
    ],
)
def test_an_address_is_bound_where_it_says_and_without_a_host_everywhere(address, reached_at):
    with bind(address) as listening, socket.create_connection((reached_at, listening.getsockname()[1])):
        accepted, _ = listening.accept()
        accepted.close()


def test_an_answer_does_not_wait_for_the_client_s_acknowledgement():
    with bind("127.0.0.1:0") as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_in_use_is_an_error_at_once():
    with bind("127.0.0.1:0") as listening, pytest.raises(OSError, match="in use"):
        bind(f"127.0.0.1:{listening.getsockname()[1]}")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://127.0.0.1:0", "https://127.0.0.1:9443"),
        ("https://[::1]:0/hooks", "https://[::1]:9443/hooks"),
        ("https://example.com", "https://example.com"),
        ("https://10.0.0.1:8443/x", "https://10.0.0.1:8443/x"),
    ],
)
def test_port_zero_in_the_url_is_the_port_that_was_bound(url, told):
    assert with_port(url, 9443) == told


def test_a_url_without_a_host_is_an_error():
    with pytest.raises(ValueError, match="no host"):
        certificate_names(namespace="n", url="https:///x", service="s")
