"""What the fake cloud does with a workload: its environment, its registry login, and its ports."""

import asyncio
import hashlib
from typing import Any

import aiohttp
import pytest

from providers.base import End, EndReason, Machine, MachineState, Ref, RegistryLogin
from tests.providers.conftest import Pair, a_workload
from tests.providers.rows import ROWS

PRIVATE = {"images": {"private": {"ghcr.io": "user:canary-5f2d"}, "missing": ["gone:1"]}}
SERVING = {"serve": {}, "life": {"boot_s": 0}}

pytestmark = pytest.mark.parametrize("row", ROWS[:1], ids=str)


async def test_values_of_the_environment_arrive_and_only_their_digests_are_kept(pair: Pair):
    accepted = await pair.rented(workload=a_workload(env={"TOKEN": "canary-5f2d"}))

    truth = await pair.cloud.truth()
    (machine,) = [each for each in truth["machines"] if each["id"] == accepted.ref.resource_id]
    assert machine["env_digests"] == {"TOKEN": hashlib.sha256(b"canary-5f2d").hexdigest()}
    assert "canary-5f2d" not in str(truth)


@pytest.mark.parametrize(
    ("image", "login", "said"),
    [
        ("ghcr.io/app:1", None, "pull of ghcr.io/app:1 failed: authentication required"),
        ("ghcr.io/app:1", "wrong", "pull of ghcr.io/app:1 failed: access denied"),
        ("gone:1", None, "pull of gone:1 failed: not found"),
    ],
    ids=["no-login", "wrong-login", "missing"],
)
async def test_an_image_that_cannot_be_pulled_fails_the_machine_at_its_boot(
    new_pair: Any, image: str, login: str | None, said: str
):
    pair = await new_pair(**PRIVATE)
    registry = login and RegistryLogin(server="ghcr.io", username="user", password=login)

    accepted = await pair.rented(workload=a_workload(image=image, registry=registry or None))

    machine = await _got(pair, accepted.ref)
    assert machine.state is MachineState.EXITED
    assert machine.end == End(reason=EndReason.FAILED, message=said, image=True, at=machine.end.at)


async def test_a_login_pulls_a_private_image(new_pair: Any):
    pair = await new_pair(**PRIVATE)
    login = RegistryLogin(server="ghcr.io", username="user", password="canary-5f2d")

    accepted = await pair.rented(workload=a_workload(image="ghcr.io/app:1", registry=login))

    assert (await _got(pair, accepted.ref)).state is MachineState.RUNNING


async def test_each_port_of_a_running_workload_is_served_somewhere(new_pair: Any):
    pair = await new_pair(**SERVING)
    accepted = await pair.rented(workload=a_workload(ports=(80, 9000)))

    machine = await _got(pair, accepted.ref)

    assert {port.port for port in machine.ports} == {80, 9000}
    assert [await _status(port.address, "/x?y=1") for port in machine.ports] == [200, 200]
    asked = await pair.cloud.requests(accepted.ref.resource_id)
    assert [(each["port"], each["path"]) for each in asked] == [
        (port.port, "/x?y=1") for port in machine.ports
    ]


async def test_a_workload_refuses_connections_until_it_is_ready_and_while_it_is_closed(new_pair: Any):
    pair = await new_pair(serve={"ready_after_s": 3600})
    accepted = await pair.rented(workload=a_workload(ports=(80,)))
    unready = await _address(pair, accepted.ref)
    assert await _status(unready) is None

    pair = await new_pair(**SERVING)
    accepted = await pair.rented(workload=a_workload(ports=(80,)))
    where, machine = await _address(pair, accepted.ref), accepted.ref.resource_id
    assert await _status(where) == 200
    await pair.cloud.set_health(machine, open_=False)
    assert await _status(where) is None
    await pair.cloud.set_health(machine, open_=True, status=503)
    assert await _status(where) == 503


async def test_an_ended_workload_serves_nothing_any_more(new_pair: Any):
    pair = await new_pair(**SERVING)
    accepted = await pair.rented(workload=a_workload(ports=(80,)))
    where = await _address(pair, accepted.ref)

    await pair.cloud.exit(accepted.ref.resource_id, code=0)

    assert (await _got(pair, accepted.ref)).ports == ()
    assert await _status(where) is None


async def test_a_restarted_cloud_serves_its_running_workloads_again(new_pair: Any):
    pair = await new_pair(**SERVING)
    accepted = await pair.rented(workload=a_workload(ports=(80,)))

    await pair.cloud.kill()
    await pair.cloud.start()

    assert await _status(await _address(pair, accepted.ref)) == 200


async def _got(pair: Pair, ref: Ref) -> Machine:
    machine = await pair.provider.get(ref)
    assert machine is not None
    return machine


async def _address(pair: Pair, ref: Ref) -> str:
    (port,) = (await _got(pair, ref)).ports
    return port.address


async def _status(address: str, path: str = "/") -> int | None:
    """The status of an answer; None where no connection could be had."""
    try:
        async with (
            asyncio.timeout(10),
            aiohttp.ClientSession() as http,
            http.get(f"http://{address}{path}") as response,
        ):
            return response.status
    except aiohttp.ClientConnectorError:
        return None
