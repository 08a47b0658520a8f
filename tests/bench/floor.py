"""The yardstick: a controller that makes the writes of one Pod's life and nothing else.

No database, no cloud, no cache, no checks: it creates claim and binding, lifts the gate, marks, binds, says
Ready, and undoes it all, each write right after the one before. What the product costs above it is thinking.
Its webhook adds gate and toleration. Run by the bench as a process of its own, so that its CPU is its own.
"""

import argparse
import asyncio
import ssl
import tempfile
import time
from base64 import b64encode
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from app.api import keys
from app.kube import paths, pki
from app.kube.client import Kube, Obj
from app.kube.errors import KubeError, Replaced
from app.kube.patches import timestamp

PROVIDER = "floor"
WEBHOOK = "nebula-bench-floor"
NODE = keys.node_name(PROVIDER)
_IP = "10.0.0.1"


@dataclass(slots=True)
class Life:
    """What is known of one Pod: the UID of its claim, and which step is under way or done."""

    claim: str = ""
    steps: set[str] = field(default_factory=set)


class Floor:
    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube.room("floor"), namespace
        self._lives: dict[str, Life] = {}

    async def run(self) -> None:
        """Follow the Pods of the namespace until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            async for page in self._kube.list_pages(paths.pods(self._namespace)):
                version = page["metadata"]["resourceVersion"]
            while True:  # the server ends the watch of whoever reads too slowly
                query = {"resourceVersion": version}
                stream = self._kube.watch_lines(paths.pods(self._namespace), silence_s=3600, query=query)
                async with aclosing(stream):
                    async for lines in stream:
                        for line in filter(None, lines):
                            event = orjson.loads(line)
                            version = event["object"]["metadata"]["resourceVersion"]
                            self._take(tasks, event["type"], event["object"])

    def _take(self, tasks: asyncio.TaskGroup, kind: str, pod: Obj) -> None:
        life = self._lives.setdefault(pod["metadata"]["uid"], Life())
        if kind == "DELETED":
            step = "end"
        elif pod["metadata"].get("deletionTimestamp"):
            step = "let go"
        elif pod["spec"].get("schedulingGates"):
            step = "place"
        elif pod["spec"].get("nodeName"):
            step = "serve"
        else:
            return
        if step not in life.steps:
            life.steps.add(step)
            work = {"end": self._end, "let go": self._let_go, "place": self._place, "serve": self._serve}[
                step
            ]
            tasks.create_task(work(pod, life))

    async def _place(self, pod: Obj, life: Life) -> None:
        meta = pod["metadata"]
        name = keys.claim_name(meta["namespace"], meta["name"])
        labels = keys.claim_labels(pool=PROVIDER, provider=PROVIDER, account="default", installation="floor")
        claim = await self._kube.create(
            paths.nodeclaims(),
            {
                "apiVersion": keys.API_VERSION,
                "kind": keys.NODE_CLAIM,
                "metadata": {"name": name, "labels": labels, "finalizers": [keys.CLAIM_FINALIZER]},
                "spec": {
                    "podRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                    "poolRef": PROVIDER,
                    "provider": PROVIDER,
                    "capacityType": "OnDemand",
                    "accelerator": "T4:1",
                },
            },
        )
        life.claim = claim["metadata"]["uid"]
        owner = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "name": name,
            "uid": life.claim,
            "controller": True,
        }
        binding = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.CLOUD_POD_BINDING,
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": {
                "podRef": {"name": meta["name"], "uid": meta["uid"]},
                "claimName": name,
                "provider": PROVIDER,
                "capacityType": "OnDemand",
            },
        }
        await self._kube.create(paths.cloudpodbindings(meta["namespace"]), binding)
        ungate = {
            "metadata": {"uid": meta["uid"], "annotations": {keys.CAPACITY_TYPE_ANNOTATION: "OnDemand"}},
            "spec": {"nodeSelector": keys.placement_labels(PROVIDER), "schedulingGates": []},
        }
        await self._kube.patch(paths.pod(meta["namespace"], meta["name"]), ungate, kind="merge")

    async def _serve(self, pod: Obj, life: Life) -> None:
        meta = pod["metadata"]
        name = keys.claim_name(meta["namespace"], meta["name"])
        claim = paths.nodeclaim_status(name)
        machine = f"fl-{meta['uid'][:13]}"
        mark = {"sequence": 1, "sendBy": timestamp(datetime.now(UTC))}
        await self._status(claim, {"attempt": mark, "phase": "Provisioning"})
        bound = {"phase": "Bound", "instanceID": machine, "account": "default", "nodeName": NODE}
        await self._status(claim, bound | {"endpoint": _IP})
        binding = paths.cloudpodbinding_status(meta["namespace"], name)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Running",
            "message": "the machine is reachable",
        }
        ready["lastTransitionTime"] = timestamp(datetime.now(UTC))
        await self._status(
            binding,
            {"phase": "Bound", "instanceID": machine, "pricePerHour": "0.4", "conditions": [ready]},
        )
        body = {
            "metadata": {"uid": meta["uid"], "annotations": {keys.INSTANCE_ID_ANNOTATION: machine}},
            "status": _running(pod, machine),
        }
        await self._kube.patch(paths.pod_status(meta["namespace"], meta["name"]), body, kind="strategic")

    async def _status(self, path: str, status: Obj) -> None:
        await self._kube.patch(path, {"status": status}, kind="merge", metadata_only=True)

    async def _let_go(self, pod: Obj, life: Life) -> None:
        meta = pod["metadata"]
        path = paths.pod(meta["namespace"], meta["name"])
        await _unless_gone(self._kube.delete(path, uid=meta["uid"], grace_s=0))

    async def _end(self, pod: Obj, life: Life) -> None:
        meta = pod["metadata"]
        path = paths.nodeclaim(keys.claim_name(meta["namespace"], meta["name"]))
        await _unless_gone(self._kube.delete(path, uid=life.claim))
        body = {"metadata": {"uid": life.claim, "finalizers": []}}
        await _unless_gone(self._kube.patch(path, body, kind="merge", metadata_only=True))
        self._lives.pop(meta["uid"], None)

    async def _beat(self) -> None:
        while True:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": NODE},
                "spec": {
                    "holderIdentity": NODE,
                    "leaseDurationSeconds": 40,
                    "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                },
            }
            await self._kube.patch(
                paths.lease("kube-node-lease", NODE), lease, kind="apply", params={"fieldManager": "floor"}
            )
            await asyncio.sleep(10)


async def _unless_gone(work: Any) -> None:
    try:
        await work
    except Replaced:
        return


def _running(pod: Obj, machine: str) -> Obj:
    now = timestamp(datetime.now(UTC))
    true = {"status": "True", "lastTransitionTime": now, "observedGeneration": pod["metadata"]["generation"]}
    kinds = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    container = pod["spec"]["containers"][0]
    return {
        "phase": "Running",
        "reason": "Running",
        "message": "Pod is running",
        "startTime": now,
        "podIP": _IP,
        "podIPs": [{"ip": _IP}],
        "conditions": [{"type": kind, **true} for kind in kinds],
        "containerStatuses": [
            {
                "name": container["name"],
                "state": {"running": {"startedAt": now}},
                "lastState": {},
                "ready": True,
                "started": True,
                "restartCount": 0,
                "image": container["image"],
                "imageID": "",
                "containerID": f"{PROVIDER}://{machine}",
            }
        ],
    }


async def make_node(kube: Kube) -> None:
    """The node that the Pods are bound to."""
    now = timestamp(datetime.now(UTC))
    room = {"cpu": "10M", "memory": "1Ei", "pods": "100k", keys.GPU_RESOURCE: "1M"}
    node = {
        "metadata": {"name": NODE, "labels": keys.node_labels(PROVIDER)},
        "spec": {"taints": [keys.node_taint(PROVIDER)]},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
            ],
        },
    }
    await kube.create(paths.nodes(), node)


async def serve_webhook(kube: Kube, namespace: str, folder: Path) -> None:
    """Add gate and toleration to the Pods of the namespace, as the product's webhook does."""
    now = datetime.now(UTC)
    authority = pki.mint_ca(now=now, life=timedelta(days=1))
    leaf = pki.mint_leaf(authority, names=["127.0.0.1"], now=now, life=timedelta(days=1))
    (folder / "webhook.pem").write_bytes(leaf.certificate + leaf.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "webhook.pem")
    gate = {"op": "add", "path": "/spec/schedulingGates", "value": [{"name": keys.SCHEDULING_GATE}]}
    toleration = {"op": "add", "path": "/spec/tolerations/-", "value": dict(keys.TOLERATION)}
    patch = b64encode(orjson.dumps([gate, toleration])).decode()

    async def review(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        answer = {"uid": asked["request"]["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    application = web.Application()
    application.router.add_post("/", review)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=120)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods"],
        "operations": ["CREATE"],
        "scope": "Namespaced",
    }
    webhook = {
        "name": "floor.bench.local",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/",
            "caBundle": b64encode(authority.certificate).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [rule],
    }
    await kube.create(paths.mutating_webhooks(), {"metadata": {"name": WEBHOOK}, "webhooks": [webhook]})


async def clean(kube: Kube) -> None:
    """Take away what the floor has left in the cluster."""
    for path in (paths.mutating_webhook(WEBHOOK), paths.node(NODE)):
        try:
            await kube.delete(path)
        except KubeError:
            continue


async def _main(kubeconfig: str, namespace: str) -> None:
    import asyncio.sslproto

    asyncio.sslproto.SSLProtocol.max_size = 32 * 1024  # type: ignore[attr-defined]  # as the product does
    async with await Kube.connect(kubeconfig=kubeconfig) as kube:
        with tempfile.TemporaryDirectory() as folder:
            await make_node(kube)
            await serve_webhook(kube.room("floor"), namespace, Path(folder))
            began = time.monotonic()
            print("ready", flush=True)
            try:
                await Floor(kube, namespace).run()
            finally:
                print(f"ended after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--namespace", required=True)
    given = parser.parse_args()
    asyncio.run(_main(given.kubeconfig, given.namespace))
