"""Webhook configurations on a real API server, which really calls the webhook."""

import asyncio
import base64
import copy
import json
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from app.api import keys
from app.kube import paths, pki
from app.kube.certificates import Certificates
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.kube.installation import INSTALLATION_SECRET
from app.kube.webhooks import OtherInstallation, WebhookKeeper, difference, with_bundle
from tests.cluster.kube.scripted import refusal
from tests.cluster.kube.waiting import until

DAY = timedelta(days=1)


def a_configuration(namespace: str, *, kind="ValidatingWebhookConfiguration", url="https://127.0.0.1:1/x"):
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    webhook = {
        "name": "test.nebula.inftyai.com",
        "clientConfig": {"url": url},
        "rules": [rule],
        "namespaceSelector": selector,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    metadata = {"name": f"{namespace}-{kind.lower()[:8]}", "labels": {"app": "nebula"}}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "webhooks": [webhook],
    }


def a_bundle() -> bytes:
    return pki.mint_ca(now=datetime.now(UTC), life=DAY).certificate


@asynccontextmanager
async def kept(kube: Kube, *configurations, bundle):
    keeper = WebhookKeeper(kube, configurations, namespace="ours", ca_bundle=bundle)
    try:
        yield keeper
    finally:
        await keeper.remove()


def trusted(configuration) -> bytes:
    return base64.b64decode(configuration["webhooks"][0]["clientConfig"]["caBundle"])


async def test_configurations_are_made_and_then_left_alone(kube: Kube, namespace):
    bundle = a_bundle()
    mutating = a_configuration(namespace, kind="MutatingWebhookConfiguration")
    validating = a_configuration(namespace)
    async with kept(kube, mutating, validating, bundle=lambda: bundle) as keeper:
        await keeper.apply()
        assert keeper.in_place
        path = paths.validating_webhook(validating["metadata"]["name"])
        first = await kube.get(path)
        await keeper.apply()

        assert await kube.get(path) == first  # the server's defaults are no difference
        assert trusted(first) == bundle
        assert trusted(await kube.get(paths.mutating_webhook(mutating["metadata"]["name"]))) == bundle


async def test_what_was_changed_or_deleted_by_hand_is_mended(kube: Kube, namespace):
    bundle, configuration = a_bundle(), a_configuration(namespace)
    path = paths.validating_webhook(configuration["metadata"]["name"])
    async with kept(kube, configuration, bundle=lambda: bundle) as keeper:
        await keeper.apply()
        ignoring = copy.deepcopy((await kube.get(path))["webhooks"])
        ignoring[0]["failurePolicy"] = "Ignore"
        await kube.patch(path, {"webhooks": ignoring, "metadata": {"labels": {"theirs": "x"}}}, kind="merge")
        await keeper.apply()
        mended = await kube.get(path)
        assert mended["webhooks"][0]["failurePolicy"] == "Fail"
        assert mended["metadata"]["labels"] == {"app": "nebula", "theirs": "x"}

        await kube.delete(path)
        await keeper.apply()
        assert await kube.find(path) is not None


async def test_a_new_bundle_is_written_and_an_older_replica_does_not_take_it_back(kube: Kube, namespace):
    old, new = a_bundle(), a_bundle()
    configuration = a_configuration(namespace)
    path = paths.validating_webhook(configuration["metadata"]["name"])
    async with (
        kept(kube, configuration, bundle=lambda: old) as behind,
        kept(kube, configuration, bundle=lambda: old + new) as ahead,
    ):
        await behind.apply()
        await ahead.apply()
        await behind.apply()

        assert pki.fingerprints(trusted(await kube.get(path))) == pki.fingerprints(old + new)


async def test_expressions_that_a_cloud_adds_to_a_selector_are_not_fought_over(kube: Kube, namespace):
    bundle, configuration = a_bundle(), a_configuration(namespace)
    path = paths.validating_webhook(configuration["metadata"]["name"])
    added = {"key": "control-plane", "operator": "DoesNotExist"}
    ours = {"key": "a", "operator": "Exists"}
    configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"] = [ours]
    async with kept(kube, configuration, bundle=lambda: bundle) as keeper:
        await keeper.apply()
        changed = copy.deepcopy((await kube.get(path))["webhooks"])
        changed[0]["namespaceSelector"]["matchExpressions"].append(added)
        before = await kube.patch(path, {"webhooks": changed}, kind="merge")
        await keeper.apply()

        assert (await kube.get(path))["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_a_second_installation_in_the_cluster_is_refused_until_the_first_one_is_gone(
    kube: Kube, namespace
):
    configuration = a_configuration(namespace)
    path = paths.validating_webhook(configuration["metadata"]["name"])
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": INSTALLATION_SECRET},
        "stringData": {"id": "aaaaaaaaaa"},
    }
    first = WebhookKeeper(kube, [configuration], namespace=namespace, ca_bundle=a_bundle)
    second = WebhookKeeper(kube, [configuration], namespace="default", ca_bundle=a_bundle)
    try:
        await kube.create(paths.secrets(namespace), secret)
        await first.apply()
        before = await kube.get(path)
        with pytest.raises(
            OtherInstallation, match=f"aaaaaaaaaa in namespace {namespace}, and can have only"
        ):
            await second.apply()
        assert "can have only one" in str(await second.missing())
        assert await kube.get(path) == before

        await kube.delete(paths.secret(namespace, INSTALLATION_SECRET))
        await second.apply()
        assert (await kube.get(path))["metadata"]["annotations"] == {keys.NAMESPACE_ANNOTATION: "default"}
    finally:
        await second.remove()


def test_a_narrower_rule_of_a_newer_version_is_a_difference():
    wanted = with_bundle(a_configuration("x"), a_bundle())
    current = copy.deepcopy(wanted)
    current["webhooks"][0]["rules"][0]["operations"].append("UPDATE")

    assert difference(current, wanted)
    assert difference(wanted, wanted) is None


def test_a_webhook_more_or_less_is_a_difference():
    wanted = with_bundle(a_configuration("x"), a_bundle())
    more = copy.deepcopy(wanted)
    more["webhooks"].append(more["webhooks"][0] | {"name": "other.example"})

    assert difference(more, wanted)
    assert difference(wanted, more)


async def test_admission_works_through_the_renewal_of_certificate_and_ca(kube: Kube, namespace):
    """The API server calls a live server whose certificate and then CA are renewed, one step at a time."""
    unit, clock = timedelta(minutes=15), [datetime.now(UTC)]
    certificates = Certificates(
        kube,
        namespace=namespace,
        names=["127.0.0.1"],
        ca_life=3 * unit,
        leaf_life=unit,
        overlap=timedelta(minutes=4),
        now=lambda: clock[0],
    )
    await certificates.refresh()
    async with reviewing(certificates.context) as (url, calls):

        async def admitted() -> None:
            obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "x-"}}
            await kube.create(paths.configmaps(namespace), obj, params={"dryRun": "All"})

        async def configured(step: int) -> None:
            """Write the configuration and wait for the API server to have read it: the path tells."""
            configuration = a_configuration(namespace, url=f"{url}/{step}")
            keeper = WebhookKeeper(
                kube, [configuration], namespace="ours", ca_bundle=lambda: certificates.ca_bundle
            )
            await keeper.apply()

            async def arrived() -> bool:
                await admitted()
                return f"/{step}" in calls

            await until(arrived)

        try:
            await configured(0)
            served = [certificates.expires_at]
            trusted_cas = [pki.fingerprints(certificates.ca_bundle)]
            steps = (0.7 * unit, 1.4 * unit, timedelta(minutes=4.1), unit)
            for step, ahead in enumerate(steps, start=1):
                clock[0] += ahead
                await certificates.refresh()
                before = len(calls)
                await admitted()  # served anew, and the configuration is still the one of the last step
                assert len(calls) == before + 1
                await configured(step)
                served.append(certificates.expires_at)
                trusted_cas.append(pki.fingerprints(certificates.ca_bundle))
        finally:
            await kube.delete(paths.validating_webhook(a_configuration(namespace)["metadata"]["name"]))

    assert len(set(served)) >= 4
    assert [len(each) for each in trusted_cas] == [1, 1, 2, 2, 1]
    assert trusted_cas[0].isdisjoint(trusted_cas[-1])


@asynccontextmanager
async def reviewing(context: ssl.SSLContext):
    """A webhook that allows everything; gives its URL and the paths that were called."""
    calls: list[str] = []

    async def review(request: web.Request) -> web.Response:
        asked = json.loads(await request.read())["request"]
        calls.append(request.path)
        answer = {"uid": asked["uid"], "allowed": True}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        # A kept connection would not meet the new certificate.
        return web.json_response(body, headers={"Connection": "close"})

    app = web.Application()
    app.router.add_post("/{tail:.*}", review)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}", calls
    finally:
        await runner.cleanup()


async def test_the_keeper_goes_on_after_a_refusal_and_looks_at_once_when_woken(scripted, told):
    scripted.refusals.extend(refusal(403, "Forbidden") for _ in range(1))
    keeper = WebhookKeeper(told, [a_configuration("x")], namespace="ours", ca_bundle=a_bundle, refresh_s=3600)
    task = asyncio.create_task(keeper.run())
    await until(lambda: len(scripted.requests) == 1)
    assert not keeper.in_place

    scripted.refusals.append(refusal(404, "NotFound"))
    keeper.wake()
    await until(lambda: len(scripted.requests) >= 2)
    task.cancel()
    await asyncio.wait((task,))


async def test_a_refusal_is_reported_by_apply(scripted, told):
    scripted.refusals.append(refusal(403, "Forbidden"))
    with pytest.raises(KubeError):
        await WebhookKeeper(told, [a_configuration("x")], namespace="ours", ca_bundle=a_bundle).apply()
