"""From one release to the next and back, while machines are rented."""

import json
from typing import Any

from hack.e2e import rights as audit
from hack.e2e.story import CHART, NAMESPACE, POOL, RELEASE, SCENARIO, Failed, Story

_APART = "clouds"  # the namespace of a cloud that no release of ours restarts
_CLOUD = ("-n", _APART, "pod/fake")


def upgrade(story: Story) -> None:
    """An upgrade and a rollback with live claims: the same machines, before, between and after"""
    before = story.claims()
    crds = story.crd_uids()
    password = story.got("secret", f"{RELEASE}-postgres", "-n", NAMESPACE)["data"]
    history = json.loads(story.helm("history", RELEASE, "-o", "json"))
    # Every replica is another one then. Not by the image: the fake cloud would end, its workloads with it.
    story.upgrade(**{"controller.podAnnotations": {"example.org/release": "next"}})
    story.kept(before)
    story.start_pod("third")
    story.until("a Pod runs after the upgrade", lambda: story.phase("third") == "Running")
    before = story.claims()
    story.helm("rollback", RELEASE, str(history[-1]["revision"]))
    story.rolled_out()
    story.kept(before)
    story.start_pod("fourth")
    story.until("a Pod runs after the rollback", lambda: story.phase("fourth") == "Running")
    if story.crd_uids() != crds:
        raise Failed("a CRD was made anew")
    if story.got("secret", f"{RELEASE}-postgres", "-n", NAMESPACE)["data"] != password:
        raise Failed("the database's password changed")
    story.one_machine_each()


def previous(story: Story) -> None:
    """From chart, image and tables of before to today's and back, by the other Helm: the same machines"""
    _cloud_apart(story)
    provider = f"fake,url=http://fake.{_APART}.svc:9090"
    sets = (f'--set-json=providers.extra=["{provider}"]', f"--set=image.tag={story.previous_tag}")
    helm = story.other_helm
    # As pipelines do it: nothing may be waited for that comes only after the wait.
    undo = "--atomic" if helm.name == "helm3" else "--rollback-on-failure"
    waits = ("--wait", undo, "--timeout=3m")
    story.helm("install", RELEASE, str(story.previous_chart), *sets, program=helm)
    story.rolled_out()
    story.until("a virtual node is ready", lambda: len(story.items("nodes")) == 2)
    story.kubectl("apply", "-f", "-", stdin=POOL)
    for name in ("old-1", "old-2", "old-3"):
        story.start_pod(name)
    story.until("they run", lambda: all(story.phase(f"old-{n}") == "Running" for n in (1, 2, 3)))
    before, uids = story.claims(), _uids(story)
    schema = story.psql("select max(revision) from schema_revision", role="nebula")

    newer = ("upgrade", RELEASE, str(CHART), "--reset-then-reuse-values", "--set=image.tag=", *waits)
    story.helm(*newer, program=helm)
    story.start_pod("new")
    story.until("a Pod runs after the upgrade", lambda: story.phase("new") == "Running")
    now = story.psql("select max(revision) from schema_revision", role="nebula")
    if now == schema:
        raise Failed(f"the upgrade has left the schema at {schema}: it was no upgrade")
    story.figures["upgraded from"] = f"schema {schema} to {now}"
    _same(story, before, uids)

    before, uids = story.claims(), _uids(story)
    story.helm("rollback", RELEASE, "1", program=helm)
    story.rolled_out()
    staying = (each for each in story.controllers() if "deletionTimestamp" not in each["metadata"])
    images = {each["spec"]["containers"][0]["image"] for each in staying}
    if not all(image.endswith(f":{story.previous_tag}") for image in images):
        raise Failed(f"after the rollback the controllers run {images}")
    story.start_pod("back")
    story.until("a Pod runs after the rollback", lambda: story.phase("back") == "Running")
    _same(story, before, uids)

    story.helm(*newer, program=helm)
    _same(story, story.claims(), uids)
    story.delete_pods()
    story.one_machine_each(*_CLOUD)
    story.helm("uninstall", RELEASE, program=helm)
    # Rights change before Pods do, forwards and backwards: neither version may want for one.
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    if found := audit.used(story.plane.audit_log, account=account, given=frozenset()).forbidden:
        raise Failed(f"{len(found)} requests of the controller were forbidden: {found[:5]}")


def _same(story: Story, before: dict[str, str], uids: dict[str, str]) -> None:
    story.kept(before)
    now = _uids(story)
    if changed := {name: uid for name, uid in uids.items() if now.get(name) != uid}:
        raise Failed(f"these are gone or were made anew: {sorted(changed)}")
    story.one_machine_each(*_CLOUD)


def _uids(story: Story) -> dict[str, str]:
    """Of everything that a release must not make anew."""
    kinds = ("nodeclaims", "cloudpodbindings", "nodepools", "pods", "nodes")
    return story.crd_uids() | {
        f"{kind}/{name}": uid for kind in kinds for name, uid in story.uids(kind).items()
    }


def _cloud_apart(story: Story) -> None:
    """A fake cloud of today's image that is no release's: a real one does not restart with ours, either."""
    labels = {"cloud": "fake"}
    user = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532}
    container = {
        "name": "fake",
        "image": story.image,
        "args": [
            "simulate",
            "fake",
            "--state=/state",
            "--host=*",
            "--port=9090",
            "--scenario=/scenario/s.yaml",
        ],
        "readinessProbe": {"httpGet": {"path": "/v1/about", "port": 9090}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "state", "mountPath": "/state"},
            {"name": "scenario", "mountPath": "/scenario"},
        ],
    }
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _APART}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "scenario", "namespace": _APART},
            "data": {"s.yaml": json.dumps(SCENARIO)},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "fake", "namespace": _APART},
            "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": 9090}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "fake", "namespace": _APART, "labels": labels},
            "spec": {
                "securityContext": user,
                "automountServiceAccountToken": False,
                "containers": [container],
                "volumes": [
                    {"name": "state", "emptyDir": {}},
                    {"name": "scenario", "configMap": {"name": "scenario"}},
                ],
            },
        },
    ]
    story.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )
    story.kubectl("wait", "pod/fake", "-n", _APART, "--for=condition=Ready", "--timeout=60s")
