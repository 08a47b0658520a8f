"""The webhook's certificates over their whole life, shared by replicas, on a real API server."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from app.kube import paths, pki
from app.kube.certificates import SECRET, BadCertificates, Certificates
from app.kube.client import Kube
from app.kube.errors import KubeError

NAME = "nebula-webhook-service.nebula-system.svc"
DAY = timedelta(days=1)
# OpenSSL checks certificates by the real time and ours begin an hour early, so a test that shakes hands may
# go less than an hour ahead of it: lives are short there.
UNIT = timedelta(minutes=15)


class Clock:
    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.time


def a_replica(kube: Kube, namespace: str, clock, names=(NAME,), **options) -> Certificates:
    return Certificates(kube, namespace=namespace, names=names, now=clock, **options)


async def secret(kube: Kube, namespace: str) -> dict[str, bytes]:
    held = await kube.get(paths.secret(namespace, SECRET))
    return {key: base64.b64decode(value) for key, value in held["data"].items()}


@asynccontextmanager
async def serving(replica: Certificates) -> AsyncIterator[int]:
    async def hello(reader, writer):
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=replica.context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def greeted(port: int, *, trusting: bytes, name: str = NAME) -> bytes:
    """What a client reads that trusts ``trusting`` and checks strictly; it raises when it does not trust."""
    context = ssl.create_default_context(cadata=trusting.decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.behaviour(340)
async def test_the_first_replica_makes_what_all_replicas_serve(kube: Kube, namespace):
    one, two = a_replica(kube, namespace, Clock()), a_replica(kube, namespace, Clock())
    assert not one.ready

    await asyncio.gather(one.refresh(), two.refresh())

    assert one.ca_bundle == two.ca_bundle
    held = await secret(kube, namespace)
    assert held["ca.crt"] == one.ca_bundle
    for replica in (one, two):
        assert replica.ready
        async with serving(replica) as port:
            assert await greeted(port, trusting=one.ca_bundle) == b"hello"


@pytest.mark.behaviour(341)
async def test_a_shipped_empty_secret_is_filled(kube: Kube, namespace):
    await kube.create(
        paths.secrets(namespace),
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "labels": {"a": "b"}}},
    )
    replica = a_replica(kube, namespace, Clock())

    await replica.refresh()

    held = await kube.get(paths.secret(namespace, SECRET))
    assert held["metadata"]["labels"] == {"a": "b"}
    assert set(held["data"]) >= {"ca.crt", "ca.key", "tls.crt", "tls.key"}


async def test_a_refresh_that_finds_nothing_due_writes_nothing(kube: Kube, namespace):
    replica = a_replica(kube, namespace, Clock())
    await replica.refresh()
    before = await kube.get(paths.secret(namespace, SECRET))
    told = []
    replica.on_change(lambda: told.append(1))

    await replica.refresh()

    after = await kube.get(paths.secret(namespace, SECRET))
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert told == []


@pytest.mark.field_case("FC-102")
async def test_a_serving_certificate_is_renewed_before_it_ends_and_loaded_without_a_restart(
    kube: Kube, namespace
):
    clock = Clock()
    one, two = (a_replica(kube, namespace, clock, leaf_life=UNIT) for _ in range(2))
    await one.refresh()
    await two.refresh()
    async with serving(two) as port:
        bundle, ends = two.ca_bundle, two.expires_at
        clock.time += UNIT * 0.6
        await one.refresh()
        assert one.expires_at == ends  # not due
        clock.time += UNIT * 0.1
        await one.refresh()
        await two.refresh()

        assert two.expires_at == one.expires_at > ends
        assert two.ca_bundle == bundle
        context = ssl.create_default_context(cadata=bundle.decode())
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
        served = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    held = await secret(kube, namespace)
    assert ssl.DER_cert_to_PEM_cert(served).strip().encode() == held["tls.crt"].strip()


@pytest.mark.behaviour(345)
@pytest.mark.field_case("FC-102")
async def test_a_new_ca_is_trusted_by_everybody_before_it_signs(kube: Kube, namespace):
    """Whatever the order in which replicas refresh, what each serves is in the bundle that each knows."""
    clock = Clock()
    lives = {"ca_life": 3 * UNIT, "leaf_life": UNIT, "overlap": timedelta(minutes=4)}
    one, two = (a_replica(kube, namespace, clock, **lives) for _ in range(2))
    await one.refresh()
    await two.refresh()
    first = one.ca_bundle

    clock.time += 2.1 * UNIT
    await one.refresh()
    staged = one.ca_bundle
    assert len(pki.split(staged)) == 2
    async with serving(one) as port:  # signs as before: whoever knows only the old bundle still trusts it
        assert await greeted(port, trusting=first) == b"hello"

    clock.time += timedelta(minutes=2)
    await two.refresh()  # everybody has the bundle long before the new CA signs
    assert pki.fingerprints(two.ca_bundle) == pki.fingerprints(staged)

    clock.time += timedelta(minutes=2, seconds=1)
    await two.refresh()
    held = await secret(kube, namespace)
    new = pki.Pair(pki.split(held["ca.crt"])[0], held["ca.key"])
    assert pki.belongs(new)
    assert pki.signed_by(held["tls.crt"], new.certificate)
    assert pki.fingerprints(held["ca.crt"]) == pki.fingerprints(staged)
    async with serving(one) as port:  # has not refreshed: its old certificate is still trusted
        assert await greeted(port, trusting=two.ca_bundle) == b"hello"

    clock.time += UNIT
    await one.refresh()
    assert pki.fingerprints(first).isdisjoint(pki.fingerprints(one.ca_bundle))  # ended, and gone


@pytest.mark.field_case("FC-102")
async def test_certificates_that_nobody_renewed_in_time_are_made_anew(kube: Kube, namespace):
    clock = Clock()
    replica = a_replica(kube, namespace, clock, ca_life=3 * DAY, leaf_life=DAY)
    await replica.refresh()
    old = replica.ca_bundle

    clock.time += 10 * DAY
    assert not replica.ready
    await replica.refresh()

    assert replica.ready
    assert pki.fingerprints(replica.ca_bundle).isdisjoint(pki.fingerprints(old))


@pytest.mark.field_case("FC-102")
async def test_a_deleted_secret_comes_back_with_the_same_ca(kube: Kube, namespace):
    replica = a_replica(kube, namespace, Clock())
    await replica.refresh()
    before = await secret(kube, namespace)
    await kube.delete(paths.secret(namespace, SECRET))

    await replica.refresh()

    assert await secret(kube, namespace) == before


async def test_a_secret_that_makes_no_sense_is_replaced(kube: Kube, namespace):
    replica = a_replica(kube, namespace, Clock())
    await replica.refresh()
    broken = {"data": {"tls.key": base64.b64encode(b"nonsense").decode()}}
    await kube.patch(paths.secret(namespace, SECRET), broken, kind="merge")

    fresh = a_replica(kube, namespace, Clock())
    await fresh.refresh()
    await replica.refresh()

    assert fresh.ready
    assert replica.ca_bundle == fresh.ca_bundle
    async with serving(replica) as port:
        assert await greeted(port, trusting=fresh.ca_bundle) == b"hello"


async def test_a_secret_of_somebody_else_is_used_and_never_written(kube: Kube, namespace):
    now = datetime.now(UTC)
    ca = pki.mint_ca(now=now, life=DAY)
    leaf = pki.mint_leaf(ca, names=[NAME], now=now, life=DAY / 2)
    data = {"ca.crt": ca.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    made = await kube.create(
        paths.secrets(namespace),
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": encoded},
    )
    clock = Clock()
    replica = a_replica(kube, namespace, clock, names=["another.name"])
    clock.time += DAY * 0.4  # past two thirds

    await replica.refresh()

    after = await kube.get(paths.secret(namespace, SECRET))
    assert after["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert replica.ca_bundle == ca.certificate
    await kube.delete(paths.secret(namespace, SECRET))
    await replica.refresh()
    assert await kube.find(paths.secret(namespace, SECRET)) is None


@pytest.mark.behaviour(346)
async def test_a_foreign_secret_that_cannot_be_used_is_reported(kube: Kube, namespace):
    encoded = base64.b64encode(b"nonsense").decode()
    await kube.create(
        paths.secrets(namespace),
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": {"tls.crt": encoded}},
    )

    with pytest.raises(BadCertificates, match=SECRET):
        await a_replica(kube, namespace, Clock()).refresh()


async def test_replicas_of_two_configurations_do_not_take_turns(kube: Kube, namespace):
    clock = Clock()
    old = a_replica(kube, namespace, clock, names=[NAME])
    new = a_replica(kube, namespace, clock, names=["other.example", "10.1.2.3"])
    await old.refresh()
    await new.refresh()
    version = (await kube.get(paths.secret(namespace, SECRET)))["metadata"]["resourceVersion"]
    await old.refresh()
    await new.refresh()

    assert (await kube.get(paths.secret(namespace, SECRET)))["metadata"]["resourceVersion"] == version
    assert pki.names((await secret(kube, namespace))["tls.crt"]) == {NAME, "other.example", "10.1.2.3"}
    async with serving(old) as port:
        for name in (NAME, "other.example", "10.1.2.3"):
            assert await greeted(port, trusting=old.ca_bundle, name=name) == b"hello"


async def test_the_last_good_certificate_is_served_while_the_api_server_is_away(through, proxy, namespace):
    replica = a_replica(through, namespace, Clock())
    await replica.refresh()
    await proxy.refuse()

    with pytest.raises(KubeError):
        await replica.refresh()

    async with serving(replica) as port:
        assert await greeted(port, trusting=replica.ca_bundle) == b"hello"


async def test_no_key_is_shown_by_accident(kube: Kube, namespace):
    replica = a_replica(kube, namespace, Clock())
    await replica.refresh()

    assert "PRIVATE" not in repr(replica._material)


def test_certificates_are_good_for_clocks_that_are_an_hour_behind():
    now = datetime.now(UTC)
    ca = pki.mint_ca(now=now, life=DAY)
    leaf = pki.mint_leaf(ca, names=[NAME], now=now, life=10 * DAY)

    for certificate in (ca.certificate, leaf.certificate):
        assert pki.begun(certificate) - pki.BACKDATED <= now - timedelta(minutes=59)
        assert pki.ends(certificate) <= now + DAY  # a leaf never outlives its CA
