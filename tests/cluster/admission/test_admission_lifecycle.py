"""The webhooks' own life: down, renewing, two of them, stopping."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta

import aiohttp
import orjson
import pytest
from admission_world import (
    DEADLINE_S,
    World,
    a_pod,
    certificate_at,
    gated,
    led,
    served,
    stopped,
    until,
)

from app.api import keys
from app.kube import paths, pki
from app.kube.errors import KubeError


@pytest.mark.behaviour(12, 13)
@pytest.mark.field_case("FC-103", "FC-104")
async def test_12_13_while_the_webhooks_are_down_opted_in_pods_are_refused_and_others_created(around: World):
    async with served(around.admission()):
        await around.asked()

    assert keys.POD_MUTATING_WEBHOOK in await around.refused(a_pod())
    assert not gated(await around.create(a_pod(labels={})))

    async with served(around.admission()):
        await around.asked()
        assert gated(await around.create(a_pod()))


@pytest.mark.behaviour(342, 343)
async def test_342_the_api_server_is_not_told_before_there_is_a_certificate(around: World):
    """And the reason is there for people; once it is mended, all goes on by itself."""
    system = f"{around.system}-late"
    late = around.admission(around.settings(system=system))
    running = asyncio.create_task(led(late))
    try:
        await until(lambda: "no certificate" in late.trouble)
        assert system in late.trouble
        assert not late.ready

        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}
        await around.kube.create(paths.namespaces(), namespace)
        await asyncio.wait_for(late.wait_ready(), DEADLINE_S)

        assert late.ready
        assert late.trouble == ""
    finally:
        await stopped(running)
        await around.kube.delete(paths.namespace(system))
    assert not late.ready
    assert late.trouble


SHORT = timedelta(minutes=90)
RENEWALS = {
    "the-serving-certificate": {"leaf_life": SHORT},
    "the-ca": {"leaf_life": SHORT, "ca_life": SHORT},
}


@pytest.mark.parametrize("what", RENEWALS)
@pytest.mark.behaviour(345)
@pytest.mark.field_case("FC-102")
async def test_345_a_renewal_refuses_no_pod(around: World, what: str):
    """Time begins an hour ago, so that certificates of both dates are good for the API server's own clock."""
    behind = [timedelta(minutes=61)]
    await around.kube.delete(paths.secret(around.system, keys.WEBHOOK_CERT_SECRET))
    certificates = around.certificates(
        **RENEWALS[what],
        overlap=timedelta(seconds=3),
        refresh_s=0.2,
        now=lambda: datetime.now(UTC) - behind[0],
    )
    async with served(around.admission(certificates=certificates)) as admission:
        await around.asked()
        before = await certificate_at(admission.port, trusted=certificates.ca_bundle)
        authority = pki.split(certificates.ca_bundle)[0]

        behind[0] = timedelta(0)
        refused = 0
        async with asyncio.timeout(DEADLINE_S):
            while await certificate_at(admission.port, trusted=certificates.ca_bundle) == before:
                refused += not await created(around)
        for _ in range(20):
            refused += not await created(around)

        assert refused == 0
        assert (pki.split(certificates.ca_bundle)[0] != authority) == (what == "the-ca")


async def created(around: World) -> bool:
    try:
        return gated(await around.create(a_pod(), dry=True))
    except KubeError:
        return False


@pytest.mark.behaviour(344)
async def test_344_two_replicas_serve_one_certificate_and_leave_each_other_s_work_alone(around: World):
    configurations = (
        paths.mutating_webhook(keys.MUTATING_WEBHOOK_CONFIGURATION),
        paths.validating_webhook(keys.VALIDATING_WEBHOOK_CONFIGURATION),
    )
    kept = (*configurations, paths.secret(around.system, keys.WEBHOOK_CERT_SECRET))

    async def versions() -> list[str]:
        return [(await around.kube.get(path))["metadata"]["resourceVersion"] for path in kept]

    async with served(around.admission()) as first:
        # As behind a Service: one address for both, which leads to the first one now.
        settings = around.settings().model_copy(
            update={"webhook_bind": "127.0.0.1:0", "webhook_url": first.url}
        )
        # It is ready by what an earlier leader has left there, which names another port: its own write comes.
        await first._keeper.applied.wait()
        before = await versions()
        async with served(around.admission(settings)) as second:
            trusted = first.certificates.ca_bundle
            assert await certificate_at(first.port, trusted=trusted) == await certificate_at(
                second.port, trusted=trusted
            )
            await first.certificates.refresh()
            await second.certificates.refresh()
            assert second.ready
        assert await versions() == before


@pytest.mark.behaviour(344)
async def test_344_replicas_that_start_together_agree_on_one_certificate(around: World):
    await around.kube.delete(paths.secret(around.system, keys.WEBHOOK_CERT_SECRET))
    url = "https://127.0.0.1:9"  # nobody asks them in this test
    settings = around.settings().model_copy(update={"webhook_bind": "127.0.0.1:0", "webhook_url": url})

    admissions = [around.admission(settings) for _ in range(4)]
    running = [asyncio.create_task(led(each)) for each in admissions]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(each.wait_ready() for each in admissions))
        trusted = admissions[0].certificates.ca_bundle
        presented = {await certificate_at(each.port, trusted=trusted) for each in admissions}
    finally:
        await asyncio.gather(*map(stopped, running))

    assert len(presented) == 1


async def test_a_review_under_way_is_answered_when_the_webhooks_stop(around: World):
    admission = around.admission()
    pod = a_pod()
    review = orjson.dumps(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "u-1",
                "operation": "CREATE",
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "object": pod,
            },
        }
    )
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        """Asked for only when the server has said that it is reading."""
        yield review[:40]
        half_sent.set()
        await go_on.wait()
        yield review[40:]

    running = asyncio.create_task(led(admission))
    await asyncio.wait_for(admission.wait_ready(), DEADLINE_S)
    trust = ssl.create_default_context(cadata=admission.certificates.ca_bundle.decode())
    url = f"https://127.0.0.1:{admission.port}{keys.POD_MUTATING_PATH}"
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(url, data=slowly(), ssl=trust, expect100=True))
        await asyncio.wait_for(half_sent.wait(), DEADLINE_S)
        running.cancel()
        await until(lambda: not admission.ready)
        go_on.set()
        answer = await asyncio.wait_for(asking, DEADLINE_S)
        assert orjson.loads(await answer.read())["response"]["allowed"] is True
    await asyncio.wait({running})
    assert running.cancelled()
