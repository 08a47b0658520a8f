"""Commands and ports of a RunPod container through its own sshd: a real client against a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncssh
import pytest

from app.machines import ssh
from app.machines.keys import access
from providers.base import Accepted, MachineState, NotOffered, Rejection, RejectionKind, Unavailable
from providers.capabilities import Session, SshAddress
from tests.providers.conftest import Pair, a_workload, an_attempt
from tests.providers.rows import ROWS
from tests.providers.test_runpod_cloud import A40, console, got, offering, runpod

NewPair = Callable[..., Awaitable[Pair]]
SECRET = b"a secret of this installation"
ROW = next(row for row in ROWS if row.name == "runpod")
SERVER = (
    "import http.server, os; s = http.server.HTTPServer(('127.0.0.1', int(os.environ['FAKE_PORT_8000'])),"
    " http.server.SimpleHTTPRequestHandler); s.serve_forever()"
)

pytestmark = [pytest.mark.parametrize("row", [ROW], ids=str), pytest.mark.slow]


@pytest.fixture
async def made(new_pair: NewPair) -> Callable[..., Awaitable[Pair]]:
    async def make(**quirks: Any) -> Pair:
        life = {"boot_s": 0, "exit_restarts": True}
        return await new_pair(processes={}, quirks={"sshd": True, **quirks}, life=life)

    return make


async def rented(pair: Pair, *, ssh: str | None = "image", **workload: Any) -> Accepted:
    options = {} if ssh is None else {"ssh": ssh}
    attempt = an_attempt()
    answer = await pair.provider.provision(
        attempt,
        a_workload(accelerator=A40, options=options, **({"command": ("sleep", "1000")} | workload)),
        offering=await offering(pair, shape="NVIDIA A40"),
        access=access(SECRET, attempt.identity),
        avoid=frozenset(),
    )
    assert isinstance(answer, Accepted), answer
    return answer


async def door(pair: Pair, accepted: Accepted) -> SshAddress:
    address = await runpod(pair).ssh(accepted.ref)
    assert address is not None
    return address


async def started(address: SshAddress, *command: str, stdin: bool = False, terminal: bool = False) -> Session:
    return await ssh.run(address, secret=SECRET, command=command, stdin=stdin, terminal=terminal)


async def said(source: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in source])


async def done(session: Session) -> tuple[int, bytes, bytes]:
    """Code, output and errors, and the session is let go."""
    out, err, code = await asyncio.gather(said(session.stdout), said(session.stderr), session.wait())
    await session.aclose()
    return code, out, err


async def test_a_command_has_the_containers_environment_its_output_and_its_code(made: Any):
    pair = await made()
    accepted = await rented(pair, env={"GREETING": 'it\'s "here"'})
    address = await door(pair, accepted)

    code, out, err = await done(
        await started(address, "sh", "-c", 'echo "$GREETING"; echo "oh no" >&2; exit 7')
    )

    assert (code, out, err) == (7, b'it\'s "here"\n', b"oh no\n")
    killed, _, _ = await done(await started(address, "sh", "-c", "kill -9 $$"))
    missing, _, _ = await done(await started(address, "no-such-program"))
    assert (killed, missing) == (137, 127)


async def test_input_goes_to_the_command_and_its_end_too(made: Any):
    pair = await made()
    address = await door(pair, await rented(pair))

    session = await started(address, "cat", stdin=True)
    await session.write(b"a" * 300_000)
    await session.write(b"\x00\xff the end")
    await session.end_input()

    code, out, _ = await done(session)
    assert (code, len(out), out[-10:]) == (0, 300_010, b"\x00\xff the end"[-10:])


async def test_a_terminal_has_a_size_that_changes(made: Any):
    pair = await made()
    address = await door(pair, await rented(pair))
    session = await started(address, "sh", stdin=True, terminal=True)

    assert await session.resize(columns=132, rows=50)
    await session.write(b"stty size; exit 3\n")

    code, out, _ = await done(session)
    assert code == 3
    assert b"50 132" in out


async def test_letting_go_ends_the_command(made: Any):
    pair = await made()
    address = await door(pair, await rented(pair))
    session = await started(address, "sh", "-c", "echo up; exec sleep 987")
    assert await anext(session.stdout) == b"up\n"

    await session.aclose()

    wait = "for i in $(seq 50); do pgrep -f 'sleep 98[7]' >/dev/null || exit 42; sleep 0.1; done"
    assert (await done(await started(address, "sh", "-c", wait)))[0] == 42


async def test_a_port_of_the_container_is_reached_through_it_and_no_other_is(made: Any):
    pair = await made()
    accepted = await rented(pair, command=("python3", "-c", SERVER), ports=(8000,))
    address = await door(pair, accepted)

    async def served() -> bytes:
        for _ in range(100):
            try:
                pipe = await ssh.dial(address, secret=SECRET, port=8000)
            except Unavailable:  # it does not listen yet
                await asyncio.sleep(0.05)
                continue
            await pipe.write(b"GET / HTTP/1.0\r\n\r\n")
            first = await pipe.read()
            await pipe.aclose()
            return first
        raise AssertionError("nobody serves")

    assert (await served()).startswith(b"HTTP/1.0 200")
    with pytest.raises(Unavailable, match="port 9"):
        await ssh.dial(address, secret=SECRET, port=9)


async def test_without_the_option_there_is_no_way_in_and_it_says_what_to_ask_for(made: Any):
    pair = await made()
    accepted = await rented(pair, ssh=None)

    with pytest.raises(NotOffered, match=r"annotation cloud\.aibrix\.ai/runpod-ssh"):
        await runpod(pair).ssh(accepted.ref)
    await runpod(pair).terminate(accepted.ref)
    assert await runpod(pair).ssh(accepted.ref) is None


@pytest.mark.parametrize("told", [True, False], ids=["told", "by-its-port"])
async def test_the_port_for_us_is_none_of_the_workloads(made: Any, told: bool):
    """It is mapped late, and the Pod is running and has its own endpoint all the same."""
    pair = await made(ports_after_s=0.0, ssh_told=told)
    accepted = await rented(pair, ports=(8000,))

    machine = await got(pair, accepted)

    assert machine.state is MachineState.RUNNING
    assert [port.port for port in machine.ports] == [8000]
    (shown,) = (await console(pair.cloud, "GET", "/v2/pods"))["pods"]
    assert shown["ports"] == ["8000/tcp", "22/tcp"]
    assert (await done(await started(await door(pair, accepted), "true")))[0] == 0


async def test_a_pod_waits_for_nothing_of_a_port_that_is_only_ours(made: Any):
    pair = await made(ports_after_s=3600)
    accepted = await rented(pair)

    assert (await got(pair, accepted)).state is MachineState.RUNNING
    with pytest.raises(Unavailable, match="no address outside now"):
        await runpod(pair).ssh(accepted.ref)


async def test_each_machine_has_a_key_of_its_own_and_the_accounts_keys_are_not_let_in(made: Any):
    pair = await made()
    one, two = await rented(pair), await rented(pair)

    pods = (await console(pair.cloud, "GET", "/v2/pods"))["pods"]
    keys = {pod["env"]["PUBLIC_KEY"] for pod in pods}
    assert len(keys) == 2
    assert all(key.startswith("ssh-ed25519 ") and key.count("\n") == 0 for key in keys)
    assert not any("startSsh" in pod for pod in pods)
    address, other = await door(pair, one), await door(pair, two)
    with pytest.raises(Unavailable, match="does not take our key"):
        await started(replace(other, identity=address.identity), "true")
    with pytest.raises(Unavailable, match="does not take our key"):
        await ssh.run(address, secret=b"another", command=("true",), stdin=False, terminal=False)


async def test_a_server_that_is_not_our_container_is_told_nothing(made: Any):
    """An address changes hands: whoever listens there now takes any key, and cannot know the identity."""
    pair = await made()
    address = await door(pair, await rented(pair))
    heard: list[str | None] = []

    class Anybody(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return False

    def serve(process: Any) -> None:
        heard.append(process.command)
        process.stdout.write("NEBULA_IDENTITY=nb-somebody-else\0")
        process.exit(0)

    key = asyncssh.generate_private_key("ssh-ed25519")
    async with asyncssh.listen(
        "127.0.0.1", 0, server_factory=Anybody, server_host_keys=[key], process_factory=serve
    ) as server:
        elsewhere = replace(address, port=server.get_port())
        with pytest.raises(Unavailable, match="is not this Pod's"):
            await started(elsewhere, "echo", "a secret of the user's")

    assert heard == ["cat /proc/1/environ"]


async def test_after_a_restart_the_way_in_is_another_and_works(made: Any):
    pair = await made()
    accepted = await rented(pair)
    before = await door(pair, accepted)

    assert await runpod(pair).restart(accepted.ref)
    after = await door(pair, accepted)

    assert after.port != before.port
    assert (await done(await started(after, "true")))[0] == 0
    with pytest.raises(Unavailable, match="no sshd answers"):
        await started(before, "true")


async def test_a_renamed_pod_still_takes_the_key_of_its_attempt(made: Any):
    pair = await made()
    accepted = await rented(pair)
    await pair.cloud.rename(str(accepted.ref.resource_id), "trial by hand")

    assert (await done(await started(await door(pair, accepted), "true")))[0] == 0


async def test_an_image_without_sshd_is_told_as_that(made: Any):
    """Its port is mapped, and nobody listens behind it."""
    pair = await made(sshd=False)
    accepted = await rented(pair)
    address = await door(pair, accepted)

    with pytest.raises(Unavailable, match=r"no sshd answers at 127\.0\.0\.1"):
        await started(address, "true")


async def test_an_installation_without_keys_rents_nothing_that_wants_one(made: Any):
    pair = await made()
    workload = a_workload(accelerator=A40, options={"ssh": "image"})
    answer = await pair.provider.provision(
        an_attempt(),
        workload,
        offering=await offering(pair, shape="NVIDIA A40"),
        access=None,
        avoid=frozenset(),
    )

    assert isinstance(answer, Rejection)
    assert answer.kind is RejectionKind.INVALID
    assert (await pair.cloud.truth())["machines"] == []


async def test_neither_the_key_nor_the_environment_of_a_command_is_logged(
    made: Any, caplog: pytest.LogCaptureFixture
):
    pair = await made()
    caplog.set_level("DEBUG")
    accepted = await rented(pair, env={"PASSWORD": "canary-of-the-pod"})
    address = await door(pair, accepted)

    code, out, _ = await done(await started(address, "printenv", "PASSWORD"))

    assert (code, out) == (0, b"canary-of-the-pod\n")
    assert "canary" not in caplog.text
    assert "PRIVATE" not in caplog.text + repr((accepted, address, access(SECRET, address.identity)))
