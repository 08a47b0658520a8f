"""Many callers' questions in one statement: nobody hears an answer older than the question."""

import asyncio
from collections.abc import Collection, Mapping
from decimal import Decimal

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import rentals
from app.store.engine import begin
from app.store.installation import get_or_create, next_epoch
from app.store.rentals import RENTAL_COLUMNS
from app.store.together import Together
from providers.base import ClaimUid


class Asked:
    """Answers each key with the number of the statement; the first one waits for `go`."""

    def __init__(self) -> None:
        self.statements: list[list[str]] = []
        self.go = asyncio.Event()
        self.fails: Exception | None = None

    async def __call__(self, keys: Collection[str]) -> Mapping[str, int]:
        self.statements.append(list(keys))
        number = len(self.statements)
        if number == 1:
            await self.go.wait()
        if self.fails is not None:
            raise self.fails
        return dict.fromkeys(keys, number)


async def test_who_asks_while_a_statement_is_under_way_is_answered_by_the_next():
    asked = Asked()
    together = Together(asked)
    first = asyncio.create_task(together.answer("a"))
    while not asked.statements:
        await asyncio.sleep(0)
    others = [asyncio.create_task(together.answer(key)) for key in ("a", "b", "b", "c")]
    await asyncio.sleep(0)
    asked.go.set()

    assert await first == 1
    assert await asyncio.gather(*others) == [2, 2, 2, 2]
    assert asked.statements == [["a"], ["a", "b", "c"]]


async def test_a_failure_is_heard_by_all_who_asked_and_by_nobody_after():
    asked = Asked()
    asked.go.set()
    asked.fails = OSError("no server")
    together = Together(asked)
    failed = await asyncio.gather(*map(together.answer, "ab"), return_exceptions=True)
    assert [type(one) for one in failed] == [OSError, OSError]
    asked.fails = None
    assert await together.answer("a") == 2


async def test_who_goes_away_takes_nobody_along():
    asked = Asked()
    together = Together(asked)
    gone, stays = (asyncio.create_task(together.answer(key)) for key in "ab")
    while not asked.statements:
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    asked.go.set()
    assert await stays == 1
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_rows_and_fences_of_many_claims_are_each_its_own(engine: AsyncEngine):
    uids = [ClaimUid(f"c-{n}") for n in range(3)]
    async with begin(engine) as conn:
        await get_or_create(conn, new_id="aaaaaaaaaa")
        epoch = await next_epoch(conn, 0)
        for number, uid in enumerate(uids[:2], start=1):
            claim = {name: f"some-{name}" for name in RENTAL_COLUMNS} | {"claim_uid": uid}
            sent = await rentals.intend(
                conn,
                claim,
                epoch=epoch,
                number=1,
                sequence=number,
                identity=f"nb-{number}",
                request_hash="h",
                shape="h100x1",
                ceiling=Decimal(4),
                window_s=30.0,
            )
            assert sent is not None
        found = await rentals.load_many(conn, [(uid, "fake", "default") for uid in uids])
        assert [found[uid].state for uid in uids] == ["open", "open", None]
        assert [[a.identity for a in found[uid].attempts] for uid in uids] == [["nb-1"], ["nb-2"], []]
        assert {found[uid].installation for uid in uids} == {"aaaaaaaaaa"}

        asked = [(uid, number, epoch) for uid in uids for number in (1, 2)] + [(uids[0], 1, epoch + 1)]
        assert await rentals.fence(conn, asked) == {(uids[0], 1, epoch), (uids[1], 1, epoch)}
        await rentals.begin_ending(conn, claim, reason="over", epoch=epoch)
        assert await rentals.fence(conn, asked) == {(uids[0], 1, epoch)}
