"""What RunPod's answers mean, text by text: recorded answers of the live API, and what may come."""

import os
import signal
import subprocess
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.inventory.identity import parse, parse_part
from app.store import blocks
from providers.base import (
    Accelerator,
    Access,
    Attempt,
    BlockScope,
    ClaimUid,
    CredentialRejected,
    Egress,
    EgressMode,
    EndReason,
    MachineState,
    MeterKind,
    Offering,
    ProviderConfig,
    Ref,
    RegistryLogin,
    RejectionKind,
    ResourceId,
    Throttled,
    Tier,
    Unavailable,
    Workload,
)
from providers.runpod import orders
from providers.runpod.client import Reply, _problem, _seconds
from providers.runpod.machines import end_of, machine_of
from providers.runpod.options import checked
from providers.runpod.parts import Parts
from providers.runpod.prices import name_of, offerings_of
from providers.runpod.refusals import failure, is_no_such_pod, refusal
from providers.runpod.wire import Gpus, Pod

NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications."
    " Please refresh and try again."
)
LOW_BALANCE = "Your account balance is too low to rent a pod. Please add funds to your account."
SHAPE = BlockScope(accelerator="h100:8", tier=Tier.ON_DEMAND, region="EU-RO-1")
EVERYTHING = BlockScope(everything=True)


def a_reply(status: int, detail: str | None, *, errors: list[str] | None = None, raw: bytes = b"") -> Reply:
    if detail is not None:
        body: dict[str, Any] = {"title": "Said", "status": status, "detail": detail}
        raw = orjson.dumps(body | ({"errors": errors} if errors else {}))
    return Reply(
        status=status, raw=raw, problem=_problem(status, raw), retry_after_s=5.0, clock_offset_s=None
    )


def meant(reply: Reply, **changes: Any) -> Any:
    return refusal(reply, accelerator="h100:8", region="EU-RO-1", tier=Tier.ON_DEMAND, **changes)


@pytest.mark.parametrize(
    ("status", "text", "kind", "scope"),
    [
        (400, NO_INSTANCES, RejectionKind.CAPACITY, SHAPE),
        (400, "There are not enough free GPUs on the host machine", RejectionKind.CAPACITY, SHAPE),
        (402, LOW_BALANCE, RejectionKind.QUOTA, EVERYTHING),
        (400, "You would exceed your spend limit", RejectionKind.QUOTA, EVERYTHING),
        (401, "missing bearer token", RejectionKind.AUTH, EVERYTHING),
        (403, "access denied", RejectionKind.AUTH, EVERYTHING),
        (403, "access denied: the account is suspended", RejectionKind.AUTH, EVERYTHING),
        (403, "you do not have access to this GPU pool", RejectionKind.UNSUPPORTED, SHAPE),
        (422, "Request validation failed.", RejectionKind.INVALID, None),
        (400, "You must either provide a template id or pod configuration", RejectionKind.INVALID, None),
        (413, "too large", RejectionKind.INVALID, None),
        (404, "template not found", RejectionKind.INVALID, None),
    ],
)
@pytest.mark.behaviour(205, 206, 207)
def test_fc_069_each_refusal_has_its_kind_and_no_wider_scope_than_is_true(status, text, kind, scope):
    answer = meant(a_reply(status, text))

    assert (answer.kind, answer.scope) == (kind, scope)
    assert text in answer.message


def test_fc_074_a_request_that_is_wrong_blocks_no_offering_and_says_what_is_wrong():
    errors = ["$: additional properties 'x' not allowed"]

    answer = meant(a_reply(422, "Request validation failed.", errors=errors))

    assert (answer.kind, answer.scope) == (RejectionKind.INVALID, None)
    assert "'x' not allowed" in answer.message


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("text", [NO_INSTANCES, LOW_BALANCE, "Something went wrong."])
def test_a_server_error_proves_nothing_whatever_it_says(status: int, text: str):
    assert meant(a_reply(status, text)) is None


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (400, NO_INSTANCES.encode()),
        (403, b"error code: 1010"),
        (404, b"<html>not found</html>"),
        (409, b""),
        (400, b'{"status": 500, "title": "x", "detail": "no longer any instances available"}'),
    ],
    ids=["bare-text", "edge", "html", "empty", "another-status"],
)
@pytest.mark.behaviour(208, 211, 213)
def test_what_is_not_in_the_apis_own_form_is_no_refusal(status: int, raw: bytes):
    assert meant(a_reply(status, None, raw=raw)) is None


def test_a_text_of_ours_that_is_missing_can_be_configured():
    reply = a_reply(400, "The warehouse is empty today")

    assert meant(reply).kind is RejectionKind.INVALID
    config = ProviderConfig(
        name="runpod", installation="i", options={"capacity_texts": "warehouse+is+empty|sold+out"}
    )
    assert meant(reply, capacity=checked(config).capacity_texts).kind is RejectionKind.CAPACITY


@pytest.mark.field_case("FC-022")
def test_fc_100_a_refused_login_is_never_absence():
    for status, text in ((401, "invalid API key"), (403, "access denied")):
        reply = a_reply(status, text)
        assert not is_no_such_pod(reply)
        assert isinstance(failure(reply), CredentialRejected)
    assert not is_no_such_pod(a_reply(404, None, raw=b"pod not found"))
    assert not is_no_such_pod(a_reply(404, "GET /v2/podz not found"))
    assert is_no_such_pod(a_reply(404, "pod not found"))


@pytest.mark.parametrize(("status", "text"), [(401, "invalid API key"), (403, "access denied")])
def test_fc_070_a_refused_login_takes_the_whole_account_out_and_no_other(status: int, text: str):
    answer = meant(a_reply(status, text))
    scope = blocks.Scope(provider="runpod", account="default", everything=answer.scope.everything)

    assert scope.covers(provider="runpod", account="default", accelerator="a40:1", region="EU-SE-1")
    assert not scope.covers(provider="runpod", account="spare", accelerator="h100:8", region="EU-RO-1")
    assert not scope.covers(provider="modal", account="default", accelerator="h100:8")


def test_the_edge_page_is_said_for_what_it_is():
    error = failure(a_reply(403, None, raw=b"error code: 1010"))

    assert type(error) is Unavailable
    assert "user agent" in str(error)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("Mon, 30 Nov 2026 10:00:12 GMT", 12.0), (None, 5.0), ("soon", 5.0), ("-3", 0.0)],
    ids=["seconds", "date", "none", "words", "negative"],
)
def test_fc_106_retry_after_is_read_in_seconds_and_as_a_date(header: str | None, seconds: float):
    assert _seconds(header, "Mon, 30 Nov 2026 10:00:00 GMT") == seconds


def test_fc_077_a_long_foreign_page_is_cut_short():
    error = failure(a_reply(502, None, raw=b"<html>" + b"x" * 20_000))

    assert isinstance(error, Unavailable)
    assert len(str(error)) < 600


@pytest.mark.field_case("FC-106")
def test_a_429_is_patience_and_no_refusal():
    assert isinstance(failure(a_reply(429, "rate limit exceeded for the minute window")), Throttled)


# --- pods --------------------------------------------------------------------------------------------


def a_pod(**changes: Any) -> Pod:
    body: dict[str, Any] = {
        "id": "pod1",
        "name": "nb-1",
        "status": "RUNNING",
        "env": {"NEBULA_IDENTITY": "nb-1", "SECRET": "canary"},
        "ports": ["8000/tcp"],
        "gpu": {"id": "NVIDIA A40", "count": 2},
        "disk": 20,
        "cost": 0.88,
        "runtime": {
            "uptime": 5,
            "ports": [{"private": 8000, "public": 31000, "type": "tcp", "ip": "1.2.3.4"}],
        },
        "createdAt": "2026-11-30T10:00:00Z",
    }
    return Pod.model_validate_json(orjson.dumps(body | changes))


def shown(pod: Pod, **changes: Any):
    ref = Ref(provider="runpod", account="default", region="", resource_id=ResourceId(pod.id))
    fields = {"ref": ref, "disk_usd": Decimal("0.0001"), "end": None, "trouble": None} | changes
    return machine_of(pod, **fields)


ROW = {"private": 8000, "public": 31000, "type": "tcp", "ip": "1.2.3.4"}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"status": "PROVISIONING", "runtime": None}, MachineState.QUEUED),
        ({"status": "STARTING", "runtime": None}, MachineState.BOOTING),
        ({"runtime": None}, MachineState.BOOTING),
        ({"runtime": {"uptime": 1, "ports": [ROW | {"public": None}]}}, MachineState.BOOTING),
        ({"runtime": {"uptime": 1, "ports": [ROW | {"ip": None}]}}, MachineState.BOOTING),
        ({"runtime": {"uptime": 1, "ports": [ROW | {"type": "http"}]}}, MachineState.BOOTING),
        ({}, MachineState.RUNNING),
        ({"status": "EXITED"}, MachineState.EXITED),
        ({"status": "ERROR"}, MachineState.EXITED),
        ({"status": "TERMINATED"}, MachineState.GONE),
    ],
)
def test_running_means_reachable(changes: dict[str, Any], state: MachineState):
    assert shown(a_pod(**changes)).state is state


def test_fc_080_a_word_that_we_do_not_know_ends_nothing():
    machine = shown(a_pod(status="HIBERNATING"))

    assert machine.state is MachineState.BOOTING
    assert machine.trouble == "RunPod says 'HIBERNATING'"
    assert machine.end is None


def test_a_row_that_nobody_asked_for_is_no_address():
    private = {"private": 19123, "public": 60000, "type": "http", "ip": "100.65.0.1"}
    machine = shown(a_pod(runtime={"uptime": 1, "ports": [private, ROW]}))

    assert [(each.port, each.address) for each in machine.ports] == [(8000, "1.2.3.4:31000")]
    assert machine.endpoint == "1.2.3.4:31000"


def test_an_http_port_is_behind_the_proxy():
    machine = shown(a_pod(ports=["8000/tcp", "80/http"]))

    assert machine.ports[1].address == "https://pod1-80.proxy.runpod.net"


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_fc_084_the_price_of_the_whole_pod_is_told_by_the_card(count: int):
    machine = shown(a_pod(gpu={"id": "NVIDIA A40", "count": count}, cost=0.44 * count))

    gpu, disk = machine.meters
    assert (gpu.quantity, gpu.usd) == (Decimal(count), Decimal("0.44"))
    assert (disk.kind, disk.quantity) == (MeterKind.DISK, Decimal(20))


@pytest.mark.parametrize("cost", [None, 0, -1, 1e9])
def test_an_absurd_price_is_unknown_and_never_nothing(cost: float | None):
    assert shown(a_pod(cost=cost)).meters[0].usd is None


@pytest.mark.parametrize("status", ["EXITED", "ERROR"])
def test_a_stopped_pod_costs_its_disk_whatever_it_shows(status: str):
    machine = shown(a_pod(status=status, cost=0.72))

    assert [meter.kind for meter in machine.meters] == [MeterKind.DISK]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-30T10:00:00Z", datetime(2026, 11, 30, 10, tzinfo=UTC)),
        ("2026-11-30T12:00:00+02:00", datetime(2026, 11, 30, 10, tzinfo=UTC)),
        ("2026-11-30 10:00:00.000 +0000 UTC", datetime(2026, 11, 30, 10, tzinfo=UTC)),
        ("2026-11-30T10:00:00", datetime(2026, 11, 30, 10, tzinfo=UTC)),
        (1_780_000_000_000, None),
        ("yesterday", None),
        (None, None),
    ],
)
def test_fc_081_times_are_utc_and_strange_ones_are_none(text: Any, at: datetime | None):
    assert shown(a_pod(createdAt=text)).created_at == at


def test_fc_101_of_an_environment_only_our_own_names_are_kept():
    pod = a_pod()

    assert pod.identity == "nb-1"
    assert "canary" not in repr(pod)
    assert "canary" not in repr(shown(pod))


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        ("EXITED", None, EndReason.UNKNOWN),
        ("ERROR", None, EndReason.FAILED),
        ("EXITED", "Outbid: 2026-01-01", EndReason.PREEMPTED),
        ("EXITED", "Exited by user: 2026-01-01", EndReason.TERMINATED),
        ("EXITED", "Exited by RunPod: image too large", EndReason.FAILED),
        ("EXITED", "Exited by Runpod: Insufficient balance", EndReason.TERMINATED),
        ("TERMINATED", "Terminated by user: 2026-01-01", EndReason.TERMINATED),
        ("EXITED", "Rented by User: 2026-01-01", EndReason.UNKNOWN),
    ],
)
def test_fc_073_an_end_is_an_interruption_only_where_runpod_says_so(status, said, reason):
    assert end_of(status, said).reason is reason


def test_no_end_has_an_exit_code():
    assert end_of("EXITED", "Exited by user: x").exit_code is None


# --- orders ------------------------------------------------------------------------------------------


def a_workload(**changes: Any) -> Workload:
    return Workload(**({"image": "app:1", "accelerator": Accelerator(type="A40", count=2)} | changes))


KEY = Access(ssh_public_key="ssh-ed25519 AAAA nebula", host_key="")


def an_order(
    workload: Workload, *, shape: str = "NVIDIA A40", region: str = "", access: Access | None = None
) -> dict[str, Any]:
    attempt = Attempt(
        claim_uid=ClaimUid("c"),
        number=1,
        sequence=1,
        identity="nb-identity",
        token="t",
        account="default",
        region=region,
        tier=Tier.ON_DEMAND,
        ceiling_usd_per_hour=None,
        pins={"registry": "reg1"},
    )
    offering = Offering(
        provider="runpod",
        account="default",
        region="",
        tier=Tier.ON_DEMAND,
        accelerator=workload.accelerator,
        shape=shape,
        meters=(),
    )
    return orders.order(attempt, workload, offering=offering, at=1_790_000_000, access=access)


def test_fc_108_an_order_is_for_one_pod_and_says_everything_that_runpod_guesses_otherwise():
    body = an_order(
        a_workload(
            env={"A": "1"},
            command=("run", "--all"),
            args=("x y",),
            ports=(8000, 80),
            cpu=Decimal(9),
            memory_bytes=100 * 10**9,
            disk_bytes=50 * 10**9 + 1,
            options={"http-ports": "80", "cuda-min": "12.8"},
        ),
        region="EU-RO-1|eu-se-1",
    )

    assert body == {
        "name": "nb-identity",
        "image": "app:1",
        "env": {
            "A": "1",
            "NEBULA_IDENTITY": "nb-identity",
            "NEBULA_DISK_GB": "51",
            "NEBULA_SENT": "1790000000",
        },
        "entrypoint": ["run", "--all"],
        "cmd": ["x y"],
        "ports": ["8000/tcp", "80/http"],
        "gpu": {
            "id": "NVIDIA A40",
            "count": 2,
            "minVcpuCountPerGpu": 5,
            "minRamPerGpu": 50,
            "minCudaVersion": "12.8",
        },
        "cloud": "SECURE",
        "disk": 51,
        "registry": "reg1",
        "dataCenterIds": ["EU-RO-1", "EU-SE-1"],
    }


def test_an_sshd_of_the_image_gets_this_machines_key_and_a_port_and_nothing_else():
    plain, asked = a_workload(ports=(8000,)), a_workload(ports=(8000,), options={"ssh": "image"})

    body = an_order(asked, access=KEY)

    assert body["ports"] == ["8000/tcp", "22/tcp"]
    added = {name: value for name, value in body["env"].items() if name not in an_order(plain)["env"]}
    assert added == {"PUBLIC_KEY": KEY.ssh_public_key, "NEBULA_SSH": "added"}
    assert not {"entrypoint", "cmd", "startSsh"} & body.keys()
    own = an_order(a_workload(ports=(22,), options={"ssh": "image"}), access=KEY)
    assert (own["ports"], own["env"]["NEBULA_SSH"]) == (["22/tcp"], "own")
    assert an_order(plain, access=KEY) == an_order(plain)


@pytest.mark.parametrize("job", [False, True])
def test_a_started_sshd_leaves_the_command_its_place_and_its_end(job: bool, tmp_path: Path):
    """As a container's first process would run it: the command is that process, and its code is its own."""
    report = {"job": "report"} if job else {}
    script = ("sh", "-c", "echo $$ $1; exit 3", "x", "it's")
    body = an_order(a_workload(command=script, options={"ssh": "start", **report}), access=KEY)
    (tmp_path / "sshd").write_text("#!/bin/sh\necho started >>$HOME/log\n")
    (tmp_path / "ssh-keygen").write_text("#!/bin/sh\n")
    for name in ("sshd", "ssh-keygen"):
        (tmp_path / name).chmod(0o755)
    # The folders that only root may make are not this test's.
    entry = [part.replace("/run/sshd", "~/run") for part in body["entrypoint"]]
    env = {**body["env"], "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    process = subprocess.Popen(
        entry, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    first = process.stdout.readline().split()
    if job:
        assert process.stdout.readline().split() == ["nebula-exit", "nb-identity", "3"]
        os.killpg(process.pid, signal.SIGKILL)  # a child of it may hold the pipes
    _, err = process.communicate(timeout=10)

    assert first == [first[0] if job else str(process.pid), "it's"]
    assert process.returncode == (-9 if job else 3)
    assert (tmp_path / ".ssh/authorized_keys").read_text() == KEY.ssh_public_key + "\n"
    assert (tmp_path / "log").read_text() == "started\n"
    assert "no sshd" not in err


def test_an_image_without_sshd_says_so_and_runs_its_command(tmp_path: Path):
    body = an_order(a_workload(command=("echo", "on"), options={"ssh": "start"}), access=KEY)
    entry = [
        part.replace("/run/sshd", "~/run").replace("ssh-keygen", "no-keygen") for part in body["entrypoint"]
    ]

    done = subprocess.run(
        entry,
        env=body["env"] | {"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
    )

    assert done.stdout == b"on\n"
    assert b"nebula: the image has no sshd" in done.stderr


def test_the_marketplace_is_another_shape():
    body = an_order(a_workload(), shape="community/NVIDIA A40")

    assert (body["cloud"], body["gpu"]["id"]) == ("COMMUNITY", "NVIDIA A40")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"egress": Egress(mode=EgressMode.BLOCKED)}, "egress Blocked"),
        ({"image": ""}, "image"),
        ({"working_dir": "/srv"}, "workingDir"),
        ({"env": {f"V{n}": "" for n in range(48)}}, "env has 48 variables"),
        ({"env": {"RUNPOD_API_KEY": "x"}}, "RUNPOD_API_KEY"),
        ({"env": {"A": "x" * 110_000}}, "shorter"),
        ({"args": ("x" * 110_000,)}, "shorter"),
        ({"options": {"job": "report"}}, "needs the container's command"),
        ({"options": {"http-ports": "81"}, "ports": (80,)}, "port 81"),
        ({"options": {"ssh": "start"}}, "needs the container's command"),
        ({"options": {"ssh": "image", "http-ports": "22"}, "ports": (22,)}, "port 22 as TCP"),
        ({"options": {"ssh": "image"}, "env": {"PUBLIC_KEY": "x"}}, "env PUBLIC_KEY is ours"),
        ({"options": {"ssh": "image"}, "env": {f"V{n}": "" for n in range(45)}}, "RunPod takes 44"),
    ],
    ids=[
        "egress",
        "image",
        "working-dir",
        "many",
        "reserved",
        "large-env",
        "large-args",
        "job",
        "ports",
        "ssh",
        "ssh-port",
        "ssh-key",
        "ssh-many",
    ],
)
def test_what_runpod_can_never_run_is_refused_and_named(changes: dict[str, Any], named: str):
    assert named in (orders.impossible(a_workload(**changes)) or "")


def test_what_fits_is_not_refused():
    env = {f"V{n}": "x" for n in range(46)}
    assert orders.impossible(a_workload(env=env, ports=(80,), options={"http-ports": "80"})) is None


def test_fc_124_a_registry_login_is_named_so_that_the_sweep_knows_it_and_the_account_marker_is_not():
    parts = Parts(None, provider="runpod", account="default", installation="abcdefghij")  # type: ignore[arg-type]
    login = RegistryLogin(server="ghcr.io", username="user", password="canary-77")

    name = parts._login_name(login)

    shared = parse_part(name)
    assert shared is not None
    assert (shared.installation, shared.what, str(shared)) == ("abcdefghij", "login", name)
    assert "canary" not in name
    assert parse_part(parts.marker) is None
    assert parse(parts.marker) is None


# --- prices ------------------------------------------------------------------------------------------


def test_a_price_is_for_one_card_and_the_flag_is_right_where_it_disagrees():
    gpus = Gpus.model_validate_json(
        orjson.dumps(
            {
                "gpus": [
                    {
                        "id": "NVIDIA A40",
                        "secure": True,
                        "community": False,
                        "price": {"secure": 0.44, "community": 0.3},
                        "maxCount": {"secure": 2, "community": 1},
                        "availability": "LOW",
                    },
                    {
                        "id": "NVIDIA RTX A2000",
                        "secure": True,
                        "price": {"secure": 0},
                        "availability": "NONE",
                    },
                ]
            }
        )
    )
    names = {"NVIDIA A40": "A40"}

    rows = offerings_of(gpus, provider="p", account="a", names=names, disk_usd=Decimal("0.0001"))

    assert [(str(row.accelerator), row.shape, row.available) for row in rows] == [
        ("A40:1", "NVIDIA A40", True),
        ("A40:2", "NVIDIA A40", True),
        ("RTX-A2000:1", "NVIDIA RTX A2000", False),
    ]
    assert rows[1].meters[0].usd == Decimal("0.44")
    assert rows[2].meters[0].usd is None
    assert rows[0].stock == "low"


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX-4000-SFF-Ada"),
        ("???", "unnamed"),
    ],
)
def test_a_card_that_the_catalogue_does_not_name_gets_a_name_that_a_label_can_hold(own: str, name: str):
    assert name_of(own) == name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"urll": "x"}, "urll"),
        ({"url": "api.runpod.io"}, "option url"),
        ({"url": "https://api.runpod.io/v2"}, "without /v2"),
        ({"cloud": "ALL"}, "option cloud"),
        ({"disk_usd_per_gb_month": "0"}, "disk_usd_per_gb_month"),
        ({"calls_per_s": "many"}, "calls_per_s"),
    ],
)
def test_a_wrong_option_of_the_account_is_named(options: dict[str, str], named: str):
    with pytest.raises(ValueError, match=named):
        checked(ProviderConfig(name="runpod", installation="i", options=options))
