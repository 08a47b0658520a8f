"""What machines leave behind goes, with the same rails; what others keep beside theirs stays."""

import pytest

from app.inventory.identity import SharedPart, new_installation
from tests.cluster.sweep.conftest import World
from tests.support.clouds import SMALL
from tests.support.composed import until

WITH_KEYS = {**SMALL, "keys": True}


@pytest.mark.parametrize("scenario", [WITH_KEYS], ids=["machines come with keys"])
async def test_orphans_o13_a_machines_key_goes_after_it_and_strangers_keys_and_data_stay(world: World):
    theirs = SharedPart(installation=new_installation(), what="login", digest="0" * 16)
    stay = {
        (await world.cloud.put_part("key", name="ada@laptop", region="r1"))["id"],
        (await world.cloud.put_part("registry_login", name=str(theirs), region="r1"))["id"],
        (await world.cloud.put_part("volume", name="datasets", region="r1"))["id"],
    }
    async with world.leading(sweep_part_grace_s=0.1) as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        (key,) = [part["id"] for part in await world.cloud.parts() if part["machine"] == machine]
        await term.some_sweeps()
        assert key in {part["id"] for part in await world.cloud.parts()}

        await world.remove_claim(claim)
        await world.until_gone(machine)

        async def dropped() -> bool:
            return key not in {part["id"] for part in await world.cloud.parts()}

        await until(dropped, what="the key is dropped")
        closed = await world.finding(f"key/{key}", open_=False)
        assert (closed["kind"], closed["resolved_as"]) == ("leftover-part", "gone")
        assert {part["id"] for part in await world.cloud.parts()} == stay


@pytest.mark.slow
async def test_orphans_o13_a_claims_own_volume_is_told_and_goes_only_where_the_settings_say_so(world: World):
    volume = (await world.cloud.put_part("volume", name=world.identity(), region="r1"))["id"]
    async with world.leading(sweep_part_grace_s=0.1) as term:
        told = await world.finding(f"volume/{volume}")
        await term.some_sweeps()
        assert (told["decided_by"], told["decision"]) == ("person", "report")
        assert [part["id"] for part in await world.cloud.parts()] == [volume]

    async with world.leading(sweep_part_grace_s=0.1, sweep_volumes="delete"):
        closed = await world.finding(f"volume/{volume}", open_=False)
        assert closed["resolved_as"] == "gone"
