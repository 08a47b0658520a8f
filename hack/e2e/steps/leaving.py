"""Leaving: refused while machines are rented, drained, come back to, and gone for good; with what rights."""

import json
import re
import shlex
import time

import yaml

from hack.cluster import certificates
from hack.e2e import rights as audit
from hack.e2e.story import CHART, NAMESPACE, RELEASE, ROOT, SCENARIO, Failed, Story

# Rights that this story cannot use, by what it would take.
UNUSED = {
    audit.Right("kube-node-lease", "coordination.k8s.io", "leases", "delete"): (
        "the API server's admission asks for it where a Lease names its Node as an owner"
    ),
}


def uninstall_refused(story: Story) -> None:
    """helm uninstall with live claims stops, and says what runs and what it costs; nothing has changed"""
    before = story.claims()
    said = story.helm("uninstall", RELEASE, fails=True, within_s=240)
    job = story.kubectl("logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=uninstall", "--tail=-1")
    story.show(job)
    for text in (said, job):  # Helm shows it, and it can be read again
        if "USD an hour" not in text or "Machines are still rented. Nothing was changed." not in text:
            raise Failed(f"the guard does not say what it costs:\n{said}\n{job}")
    story.rolled_out()
    story.kept(before)
    story.start_pod("fifth")
    story.until("a Pod runs after it", lambda: story.phase("fifth") == "Running")


def drained(story: Story) -> None:
    """Policy drain: Pods are evicted, machines are proven gone, the release goes; CRDs and volume stay"""
    # The refused uninstall has marked the release: a rollback to its own revision makes it deployed again.
    history = json.loads(story.helm("history", RELEASE, "-o", "json"))
    story.helm("rollback", RELEASE, str(history[-1]["revision"]))
    story.upgrade(**{"installation.uninstallPolicy": "drain"})
    recorded = story.psql("select id from installation", role="nebula")
    runs = int(story.psql("select count(*) from run", role="nebula"))
    (story.home / "recorded.json").write_text(json.dumps({"id": recorded, "runs": runs}))
    began_s = time.monotonic()
    story.helm("uninstall", RELEASE, within_s=600)
    story.figures["uninstall with drain"] = f"{time.monotonic() - began_s:.1f} s"
    if left := story.items("nodeclaims"):
        raise Failed(f"{len(left)} claims are left")
    names = [each["metadata"]["name"] for each in story.items("nodes")]
    if names != [certificates.NODE_NAME]:
        raise Failed(f"virtual nodes are left: {names}")
    hooks = story.items("mutatingwebhookconfigurations,validatingwebhookconfigurations")
    if left := [each["metadata"]["name"] for each in hooks if "nebula" in each["metadata"]["name"]]:
        raise Failed(f"webhook configurations are left: {left}")
    if len(story.crd_uids()) != 3:
        raise Failed("the CRDs are gone")
    volumes = [each["metadata"]["name"] for each in story.items("pvc", "-n", NAMESPACE)]
    if f"data-{RELEASE}-postgres-0" not in volumes:
        raise Failed(f"the database's volume is gone; left: {volumes}")
    story.until("the Pods are gone", lambda: not story.items("pods", "-n", NAMESPACE))
    # Ordinary Pods start while nothing of ours is there.
    story.kubectl("run", "ordinary", "--image=docker.io/nebula/pause:1", "--restart=Never")
    story.until("an ordinary Pod runs", lambda: story.phase("ordinary") == "Running")
    story.kubectl("delete", "pod", "ordinary", "--wait=false")


def adopts(story: Story) -> None:
    """Reinstalled on the old volume: the same installation with its history, and Pods are placed again"""
    old = json.loads((story.home / "recorded.json").read_text())
    fake = json.dumps({"enabled": True, "scenario": SCENARIO})
    story.helm("install", RELEASE, str(CHART), f"--set-json=providers.fake={fake}")
    story.rolled_out()
    if (now := story.psql("select id from installation", role="nebula")) != old["id"]:
        raise Failed(f"installation {now}, before {old['id']}")
    if int(story.psql("select count(*) from run", role="nebula")) < old["runs"]:
        raise Failed("runs of before are not in the ledger")
    story.kubectl("delete", "pods", "--all", "--wait=false")
    story.until("old Pods are gone", lambda: not story.items("pods"))
    story.start_pod("again")
    story.until("a Pod runs", lambda: story.phase("again") == "Running")
    story.one_machine_each()


def abandoned(story: Story) -> None:
    """Policy abandon: the uninstall goes through, and prints each machine that stays, with its price"""
    hooks = [each for each in yaml.safe_load_all(story.helm("get", "hooks", RELEASE)) if each]
    roles = [each for each in hooks if each["kind"] in ("ClusterRole", "Role")]
    roles.append(story.got("clusterrole", "nebula-controller"))
    roles.append(story.got("role", RELEASE, "-n", NAMESPACE))
    roles.append(story.got("role", "nebula-node-leases", "-n", "kube-node-lease"))
    (story.home / "roles.json").write_text(json.dumps(roles))

    (machine,) = story.machines()
    story.upgrade(**{"installation.uninstallPolicy": "abandon"})
    said = story.helm("uninstall", RELEASE)
    story.show(said)
    kept = story.kubectl("logs", "-n", NAMESPACE, "job/nebula-uninstall", "--tail=-1")
    for text in (said, kept):
        if machine not in text or "USD an hour" not in text:
            raise Failed(f"the guard does not name {machine} and its price: {text}")
    if story.items("nodeclaims"):
        raise Failed("a claim is left")


def rights(story: Story) -> None:
    """Nothing that the controller, the guard or the test asked for was forbidden, and no right was in vain"""
    roles = json.loads((story.home / "roles.json").read_text())
    parts: dict[str, tuple[str, ...]] = {RELEASE: ("nebula-controller", RELEASE, "nebula-node-leases")}
    parts |= {f"{RELEASE}-{part}": (f"nebula-{part}",) for part in ("uninstall", "test")}
    wrong = []
    for name, its in parts.items():
        given = audit.granted(each for each in roles if each["metadata"]["name"] in its)
        account = f"system:serviceaccount:{NAMESPACE}:{name}"
        found = audit.used(story.plane.audit_log, account=account, given=given)
        story.say(f"   {name}: {len(given)} rights given, {len(given & found.rights)} used")
        wrong += [f"{name}: forbidden: {each}" for each in found.forbidden]
        for right in sorted(given - found.rights):
            if (why := UNUSED.get(right)) is None:
                wrong.append(f"{name}: never used: {right}")
            else:
                story.say(f"   not used: {right}: {why}")
        wrong += [f"{right}: used, so take it out of UNUSED" for right in UNUSED.keys() & found.rights]
    if wrong:
        raise Failed("\n".join(wrong))


def cleared(story: Story) -> None:
    """Gone for good, by the commands of docs/install.md: nothing of ours is left in the cluster"""
    story.kubectl("delete", "pods", "--all", "--wait=false")
    story.until("the user's Pods are gone", lambda: not story.items("pods"))
    for argv in documented_remains():
        story.kubectl(*argv)
    kinds = story.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    asked = ",".join(
        kind for kind in kinds if not kind.startswith(("events", "componentstatuses", "persistentvolumes"))
    )

    def ours() -> list[str]:
        found = story.kubectl("get", asked, "-A", "-o", "name").split()
        return [each for each in found if "nebula" in each and each != f"namespace/{NAMESPACE}"]

    try:
        story.until("nothing of ours is left", lambda: not ours(), within_s=60)  # owners are collected late
    except Failed:
        raise Failed(f"left in the cluster: {ours()}") from None


def documented_remains() -> list[list[str]]:
    """The commands by which docs/install.md has what an uninstall leaves taken away, without ``kubectl``."""
    text = (ROOT / "docs" / "install.md").read_text().replace("\\\n", " ")
    return [
        shlex.split(line)[1:]
        for line in text.splitlines()
        if re.match("kubectl .*delete (pvc|secret|lease|job|crd) ", line)
    ]
