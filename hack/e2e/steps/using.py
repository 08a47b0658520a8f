"""A user's first hour: install, what is refused, the fake cloud, a Pod, its logs, its cost."""

import ssl
import time
import urllib.error
import urllib.request

from hack.e2e import measure
from hack.e2e.story import CHART, NAMESPACE, POOL, RELEASE, SCENARIO, VIRTUAL_NODE, Failed, Story

REPORTERS = "nebula-reporter"


def install(story: Story) -> None:
    """helm install with zero values, in a namespace that enforces restricted Pods: ready, and no provider"""
    story.kubectl("create", "namespace", NAMESPACE)
    story.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    began_s = time.monotonic()
    notes = story.helm("install", RELEASE, str(CHART), "--wait", "--timeout=3m")
    story.rolled_out()
    took_s = time.monotonic() - began_s
    story.figures["install to ready"] = f"{took_s:.1f} s"
    story.show(story.kubectl("get", "pods,pvc", "-n", NAMESPACE))
    if "NONE. Nothing can be rented yet" not in notes:
        raise Failed(f"the notes do not say that there is no provider:\n{notes}")
    if len(story.controllers()) != 2 or not story.leader():
        raise Failed("there are not two replicas with one leader")
    if len(story.items("nodes")) != 1 or story.items("nodeclaims"):
        raise Failed("without a provider there is a virtual node or a claim")


def idle(story: Story) -> None:
    """An idle controller: its memory, and its share of a core over twenty seconds"""
    used = measure.idle(
        [each["metadata"]["uid"] for each in story.controllers()], cgroup=story.node.cgroup, over_s=20
    )
    for number, (memory_bytes, cores) in enumerate(used):
        story.figures[f"idle replica {number}"] = f"{memory_bytes / 2**20:.0f} MiB, {cores:.2%} of a core"


def refusals(story: Story) -> None:
    """A typo, a contradiction, a second release: refused, with a sentence"""
    wrong = {
        ("--set", "controler.replicas=3"): "controler",
        ("--set", "database.mode=external"): "/database/external/host",
        ("--set", "metrics.serviceMonitor.enabled=true"): "Prometheus operator",
    }
    for argv, says in wrong.items():
        said = story.helm("upgrade", RELEASE, str(CHART), *argv, fails=True)
        if says not in said:
            raise Failed(f"helm upgrade {' '.join(argv)} does not name {says}: {said}")
    done = story.run(
        story.helm_program, "install", "second", str(CHART), "--namespace", "second", "--create-namespace"
    )
    if done.returncode == 0 or "there is a release of Nebula in this cluster already" not in done.stderr:
        raise Failed(f"a second release was not refused: {done.stdout}{done.stderr}")
    story.show(done.stderr)
    too_old = story.run(story.helm_program, "template", RELEASE, str(CHART), "--kube-version", "v1.29.9")
    if "kubeVersion: >=1.30" not in too_old.stderr:
        raise Failed(f"Kubernetes 1.29 was not refused: {too_old.stdout}{too_old.stderr}")
    story.show(too_old.stderr)


def fake_cloud(story: Story) -> None:
    """providers.fake.enabled and the report role, by an upgrade: a virtual node comes"""
    values = {"enabled": True, "scenario": SCENARIO}
    story.upgrade(**{"providers.fake": values, "database.reportRole.enabled": True})
    story.until("a virtual node is ready", lambda: len(story.items("nodes")) == 2)


def workload(story: Story) -> None:
    """The sample workload of docs/install.md runs on a rented machine"""
    story.kubectl("apply", "-f", "-", stdin=POOL)
    story.kubectl("create", "secret", "generic", "words", "--from-literal=WORD=told-to-nobody")
    began_s = time.monotonic()
    story.start_pod("first", secret="words")
    story.until("the Pod runs", lambda: story.phase("first") == "Running")
    story.figures["kubectl run to Running"] = f"{time.monotonic() - began_s:.1f} s"
    story.show(story.kubectl("get", "pods,nodepools,nodeclaims,cloudpodbindings"))
    if not story.claims().get("first"):
        raise Failed("the claim names no instance")


def streams(story: Story) -> None:
    """kubectl logs and exec reach the machine through a replica's kubelet endpoint; a stranger does not"""
    story.until("kubectl logs shows it", lambda: "first runs" in story.kubectl("logs", "first"), within_s=30)
    story.show(story.kubectl("logs", "first"))
    said = story.kubectl("exec", "first", "--", "sh", "-c", "echo from the machine; echo $WORD")
    if said.split("\n")[:2] != ["from the machine", "told-to-nobody"]:
        raise Failed(f"exec said {said!r}")
    # Not by way of the API server: with a token, as a scraper of metrics calls a kubelet.
    addresses = story.got("node", VIRTUAL_NODE)["status"]
    host = next(each["address"] for each in addresses["addresses"] if each["type"] == "InternalIP")
    port = addresses["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    token = story.kubectl("create", "token", "default").strip()
    asked = urllib.request.Request(
        f"https://{host}:{port}/nodes/{VIRTUAL_NODE}/metrics/resource",
        headers={"Authorization": f"Bearer {token}"},
    )
    try:
        urllib.request.urlopen(asked, timeout=30, context=ssl._create_unverified_context())
    except urllib.error.HTTPError as error:
        if error.code != 403:
            raise Failed(f"a token without rights got {error.code}") from error
    else:
        raise Failed("a token without rights got the figures of a node")


def helm_test(story: Story) -> None:
    """helm test: API, database, admission, a Pod's whole life, its cost, a clean audit"""
    said = story.helm("test", RELEASE, "--timeout", "4m", within_s=300)
    if "Succeeded" not in said:
        raise Failed(f"helm test does not say that it succeeded:\n{said}")


def cost(story: Story) -> None:
    """A cost query through psql as the report role; what is not a report is refused to it"""
    query = "select namespace, name, round(cost, 6) from pod_receipt"
    story.until("the ledger knows the Pod", lambda: "|first|" in story.psql(query, role=REPORTERS))
    story.show(story.psql(query, role=REPORTERS))
    story.show(story.psql("select * from cost_by_namespace limit 5", role=REPORTERS))
    asked = ("exec", "-n", NAMESPACE, f"{RELEASE}-postgres-0", "-c", "postgres", "--", "psql", "-X", "-h")
    done = story.run(
        story.plane.kubectl,
        *asked,
        "/run/postgresql",
        "-U",
        REPORTERS,
        "-d",
        "nebula",
        "-c",
        "select * from run",
    )
    if "permission denied" not in done.stderr:
        raise Failed(f"the report role may read the table run: {done.stdout}{done.stderr}")
