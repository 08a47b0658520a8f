"""What breaks: the leader, Postgres, its password, the node's peace, the database's newest rows."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from app.api import keys
from app.processes import spawn, stop
from hack.cluster import certificates
from hack.e2e.story import CONTROLLER, NAMESPACE, RELEASE, ROOT, VIRTUAL_NODE, Failed, Story

_POSTGRES = f"{RELEASE}-postgres"


def meddled(story: Story) -> None:
    """A hand in what is ours: node, webhooks and binding are put right, an edited image is told of"""
    webhooks = (
        ("mutatingwebhookconfiguration", keys.MUTATING_WEBHOOK_CONFIGURATION),
        ("validatingwebhookconfiguration", keys.VALIDATING_WEBHOOK_CONFIGURATION),
    )
    story.kubectl("label", "node", VIRTUAL_NODE, f"{keys.PROVIDER_LABEL}-")
    ignore = json.dumps([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Ignore"}])
    for kind, name in webhooks:
        story.kubectl("patch", kind, name, "--type=json", "-p", ignore)
    claim = keys.claim_name("default", "first")
    story.kubectl("delete", "cloudpodbinding", keys.binding_name(claim), "--wait=false")

    def labelled() -> bool:
        return keys.PROVIDER_LABEL in story.got("node", VIRTUAL_NODE)["metadata"]["labels"]

    story.until("the node has its label again", labelled)
    for kind, name in webhooks:
        story.until(f"the {kind} is as it was", partial(_fails_closed, story, kind, name))
    story.until(
        "the binding is there again", lambda: keys.binding_name(claim) in story.uids("cloudpodbinding")
    )
    # One without an owner stands where another Pod's will be made.
    standing = story.got("cloudpodbinding", keys.binding_name(claim))
    stranger = keys.binding_name(keys.claim_name("default", "stranger"))
    standing["metadata"] = {"name": stranger, "namespace": "default"}
    story.kubectl("create", "-f", "-", stdin=json.dumps(standing))
    story.start_pod("stranger")
    story.until("a Pod runs for all that", lambda: story.phase("stranger") == "Running")
    if not story.got("cloudpodbinding", stranger)["metadata"].get("ownerReferences"):
        raise Failed("its binding is still somebody else's")

    edits = ("edited", "again", "edited")
    for number, image in enumerate(edits):
        story.kubectl("set", "image", "pod/first", f"first={image}")
        if number < 2:
            story.until("the edit is told of", partial(_told, story, image))
    story.until("the same edit is counted", lambda: _told(story, "edited") == 2)
    story.kubectl("delete", "pod", "stranger", "--wait=false")
    story.until("its claim goes", lambda: "stranger" not in story.claims())
    story.one_machine_each()


def _fails_closed(story: Story, kind: str, name: str) -> bool:
    return bool(story.got(kind, name)["webhooks"][0]["failurePolicy"] == "Fail")


def _told(story: Story, image: str) -> int:
    """How often an Event says of the first Pod that this image is not used."""
    events = story.items("events", "--field-selector=involvedObject.name=first,reason=ImageChangeIgnored")
    return sum(each["count"] for each in events if each["message"].startswith(f"image {image} "))


def leader_killed(story: Story) -> None:
    """The leader's Pod is killed: the other one leads, nothing is rented twice, the next Pod is placed"""
    before, old = story.claims(), story.leader()
    pod = next(
        each["metadata"]["name"] for each in story.controllers() if old.startswith(each["metadata"]["name"])
    )
    began_s = time.monotonic()
    story.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
    story.until("another replica leads", lambda: story.leader() not in ("", old))
    story.figures["leader killed to next leader"] = f"{time.monotonic() - began_s:.1f} s"
    story.start_pod("second")
    story.until("the next Pod runs", lambda: story.phase("second") == "Running")
    story.rolled_out()
    story.kept(before)
    story.one_machine_each()


def postgres_killed(story: Story) -> None:
    """Postgres is killed in the middle of renting: every Pod gets exactly one machine"""
    before = story.claims()
    names = [f"storm-{number}" for number in range(4)]
    for name in names:
        story.start_pod(name)
    pod = f"{RELEASE}-postgres-0"
    story.until("a claim for the first of them", lambda: names[0] in story.claims())
    # SIGKILL to the server, then its Pod goes. Not --force: two servers might then share a volume.
    crash = "kill -9 $(head -1 /data/pgdata/postmaster.pid)"
    story.kubectl("exec", "-n", NAMESPACE, pod, "-c", "postgres", "--", "sh", "-c", crash)
    story.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--now", "--wait=false")
    took_s = story.until(
        "all of them run", lambda: all(story.phase(name) == "Running" for name in names), within_s=240
    )
    story.figures["Postgres killed while renting 4, to all Running"] = f"{took_s:.1f} s"
    story.rolled_out()
    story.kept(before)
    story.one_machine_each()
    for name in names:
        story.kubectl("delete", "pod", name, "--wait=false")
    story.until("their claims go", lambda: not set(names) & set(story.claims()))
    story.one_machine_each()


def eviction(story: Story) -> None:
    """With one replica nothing blocks a drain; a provider without its Secret is told of, and goes again"""
    story.upgrade(**{"controller.replicas": 1, "providers.extra": ["runpod"]})
    story.until("one replica", lambda: len(story.controllers()) == 1)
    (old,) = story.controllers()
    log = ("logs", "-n", NAMESPACE, old["metadata"]["name"], "--tail=-1")
    story.until(
        "the log asks for the key", lambda: "put RUNPOD_API_KEY into the account" in story.kubectl(*log)
    )
    began_s = time.monotonic()
    story.kubectl(
        "drain",
        certificates.NODE_NAME,
        "--pod-selector",
        CONTROLLER,
        "--timeout=90s",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
    )
    story.figures["one replica evicted"] = f"{time.monotonic() - began_s:.1f} s"
    story.kubectl("uncordon", certificates.NODE_NAME)
    story.rolled_out()
    (new,) = story.controllers()
    if new["metadata"]["uid"] == old["metadata"]["uid"]:
        raise Failed("the Pod was not evicted")
    # The node of a provider that is no more: whoever leads next takes it away.
    former = story.got("node", VIRTUAL_NODE)
    labels = former["metadata"]["labels"] | {keys.PROVIDER_LABEL: "former"}
    former |= {"metadata": {"name": "nebula-former", "labels": labels}, "status": {}}
    story.kubectl("create", "-f", "-", stdin=json.dumps(former))
    story.upgrade(**{"controller.replicas": 2, "providers.extra": []})
    story.until("the former provider's node is gone", lambda: "nebula-former" not in story.uids("nodes"))


def database_refuses(story: Story) -> None:
    """A wrong password, then no database: log and /readyz say why, what runs goes on, and both heal"""
    before = story.claims()
    secret = story.got("secret", _POSTGRES, "-n", NAMESPACE)["data"]["password"]
    old = {each["metadata"]["name"] for each in story.controllers()}
    _set_password(story, {"stringData": {"password": "wrong"}})
    follower = next(name for name in sorted(old) if not story.leader().startswith(name))
    story.kubectl("delete", "pod", follower, "-n", NAMESPACE)

    def newcomer() -> str:
        return next(
            (each["metadata"]["name"] for each in story.controllers() if each["metadata"]["name"] not in old),
            "",
        )

    story.until("another replica", lambda: bool(newcomer()))
    story.until("/readyz says so", lambda: "password authentication failed" in story.readyz(newcomer()))
    story.show(_about_store(story.readyz(newcomer())))
    if "password authentication failed" not in story.kubectl("logs", "-n", NAMESPACE, newcomer()):
        raise Failed("the log does not name the password")
    story.kept(before)
    _set_password(story, {"data": {"password": secret}})
    story.kubectl("delete", "pod", newcomer(), "-n", NAMESPACE)
    story.rolled_out()
    story.until("/readyz is content", lambda: all("store: ok" in text for text in _all_readyz(story)))

    story.kubectl("scale", f"statefulset/{_POSTGRES}", "-n", NAMESPACE, "--replicas=0")
    story.until("/readyz says so", lambda: not any("store: ok" in text for text in _all_readyz(story)))
    story.show(_about_store(_all_readyz(story)[0]))
    story.start_pod("patient")
    if "first runs" not in story.kubectl("logs", "first"):
        raise Failed("without a database there are no logs")
    story.kept(before)
    if story.claims().get("patient"):
        raise Failed("something was rented that is recorded nowhere")
    story.kubectl("scale", f"statefulset/{_POSTGRES}", "-n", NAMESPACE, "--replicas=1")
    story.rolled_out()
    story.until("the Pod runs after all", lambda: story.phase("patient") == "Running")
    story.kept(before)
    story.one_machine_each()


def restored(story: Story) -> None:
    """A dump is put back as docs/install.md says: what was rented since lives on, and sweeps are held"""
    story.kubectl("create", "job", "now", "-n", NAMESPACE, f"--from=cronjob/{_POSTGRES}-backup")
    story.kubectl("wait", "job/now", "-n", NAMESPACE, "--for=condition=Complete", "--timeout=120s")
    story.show(story.kubectl("logs", "job/now", "-n", NAMESPACE))
    story.start_pod("since")
    story.until("a Pod of after the dump runs", lambda: story.phase("since") == "Running")
    before = story.claims()
    story.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=documented("name: dumps"))
    story.kubectl("wait", "pod/dumps", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=120s")
    inside = ("exec", "dumps", "-n", NAMESPACE, "--")
    (name,) = story.kubectl(*inside, "ls", "/backup").split()
    dump = story.home / name
    with dump.open("wb") as file:
        cat = (*inside, "cat", f"/backup/{name}")
        subprocess.run([*_as_admin(story), *cat], stdout=file, check=True, timeout=60)
    story.kubectl("delete", "pod", "dumps", "-n", NAMESPACE, "--now")

    began_s = time.monotonic()
    story.kubectl("scale", f"deployment/{RELEASE}", "-n", NAMESPACE, "--replicas=0")
    story.until("no controller", lambda: not story.controllers())
    secret = story.kubectl(
        "get", "secret", _POSTGRES, "-n", NAMESPACE, "-o", "go-template={{.data.password | base64decode}}"
    )
    with _forwarded(story, f"service/{_POSTGRES}", 5432):
        argv = (
            "restore",
            str(dump),
            "--replace",
            "--database-url",
            f"postgresql://nebula:{secret}@127.0.0.1/nebula",
        )
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if done.returncode != 0:
        raise Failed(f"nebula restore: {done.stdout}{done.stderr}")
    story.show(done.stdout)
    story.kubectl("scale", f"deployment/{RELEASE}", "-n", NAMESPACE, "--replicas=2")
    story.rolled_out()
    story.start_pod("after")
    story.until("a Pod runs after the restore", lambda: story.phase("after") == "Running")
    story.figures["restore, from scaled to zero to the next Pod Running"] = (
        f"{time.monotonic() - began_s:.1f} s"
    )
    held = story.nebula("hold")
    story.show(held)
    if "Sweeps are held" not in held or "restored" not in held:
        raise Failed(f"the restore has set no fence: {held}")
    place = ("exec", "-n", NAMESPACE, f"deployment/{RELEASE}", "-c", "controller", "--", "nebula", "orphans")
    found = story.run(story.plane.kubectl, *place)  # its exit code tells of findings
    story.show(found.stdout)
    if "HELD" not in found.stdout:
        raise Failed(f"nebula orphans does not say that sweeps are held: {found.stdout}{found.stderr}")
    story.kept(before)
    story.one_machine_each()
    recovered = f"select count(*) from run where resource_id = '{before['since']}'"
    story.until(
        "what was rented since is recorded again", lambda: story.psql(recovered, role="nebula") == "1"
    )
    story.show(story.nebula("hold", "release", "--yes"))
    if "Nothing is held" not in story.nebula("hold"):
        raise Failed("the hold is not lifted")


def documented(part: str) -> str:
    """The manifest in docs/install.md that holds ``part``: what is read there is what is tried here."""
    text = (ROOT / "docs" / "install.md").read_text()
    for manifest in re.findall(r"<<'END'\n(.*?)\nEND\n", text, flags=re.DOTALL):
        if part in manifest:
            return str(manifest)
    raise Failed(f"docs/install.md has no manifest with {part}")


def _set_password(story: Story, patch: dict[str, dict[str, str]]) -> None:
    story.kubectl("patch", "secret", _POSTGRES, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch))


def _all_readyz(story: Story) -> list[str]:
    return [story.readyz(each["metadata"]["name"]) for each in story.controllers()]


def _about_store(readyz: str) -> str:
    return next((line for line in readyz.splitlines() if "store: " in line), readyz)


def _as_admin(story: Story) -> list[str]:
    return [str(story.plane.kubectl), f"--kubeconfig={story.plane.kubeconfig}"]


@contextmanager
def _forwarded(story: Story, target: str, port: int) -> Iterator[None]:
    """kubectl port-forward, while somebody listens."""
    argv = [*_as_admin(story), "port-forward", "-n", NAMESPACE, target, str(port)]
    child = spawn(argv, log=story.home / "port-forward.log")

    def listens() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    try:
        story.until("port-forward listens", listens, within_s=30)
        yield
    finally:
        stop(child, grace_s=2.0)
