"""Looks at gated Pods, in batches: one short transaction reads the blocks and writes the decisions of many.

A look that returned is on record, made with every block that was written before it was asked for. While the
store cannot be had, or is not this leader's yet, or waits for a person, looks fail and nothing is placed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import blocks, decisions, installation
from app.store.blocks import Block
from app.store.decisions import Decision
from app.store.engine import StoreUnavailable, begin, connect, database_now

log = structlog.get_logger()

BATCH = 100
T = TypeVar("T")


class Term(Protocol):
    """Leadership, as far as placement must know it. ``epoch`` is None until the store has it."""

    @property
    def epoch(self) -> int | None: ...
    def valid(self) -> bool: ...


class MayNotPlace(Exception):
    """Nothing may be placed now. The message says why, in the same words each time: Pods carry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look is made with: the live blocks, and the database's time."""

    blocks: Sequence[Block]
    now: datetime


Judge = Callable[[Seen], tuple[T, Decision | None]]
"""Makes the decision, and the row to record. It must not wait: it runs inside the transaction."""


@dataclass(slots=True)
class _Look(Generic[T]):
    judge: Judge[T]
    answer: "asyncio.Future[T]"


class Desk:
    """Collects with `look`, works in `run`."""

    def __init__(self, engine: AsyncEngine, *, term: Term) -> None:
        self._engine, self._term = engine, term
        self._waiting: list[_Look[Any]] = []
        self._filled = asyncio.Event()

    async def look(self, judge: Judge[T]) -> T:
        """What ``judge`` decides, once its row is committed. `run` must be running.

        Raises:
            MayNotPlace: there is no store, or it is not ours to place from. What ``judge`` raises.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Look(judge, answer))
        self._filled.set()
        return await answer

    async def live_blocks(self) -> Seen:
        """The blocks that hold now.

        Raises:
            StoreUnavailable: see there.
        """
        async with connect(self._engine) as conn:
            return Seen(blocks=await blocks.live(conn), now=await database_now(conn))

    async def run(self) -> None:
        """Serve looks until cancelled; those left then are cancelled too."""
        batch: list[_Look[Any]] = []
        try:
            while True:
                await self._filled.wait()
                batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
                if not self._waiting:
                    self._filled.clear()
                await self._serve(batch)
        finally:
            for look in (*batch, *self._waiting):
                look.answer.cancel()

    async def _serve(self, batch: list[_Look[Any]]) -> None:
        answers: list[tuple[_Look[Any], Any]] = []
        try:
            async with begin(self._engine) as conn:
                self._check(await installation.get(conn))
                seen = Seen(blocks=await blocks.live(conn), now=await database_now(conn))
                rows = []
                for look in batch:
                    if look.answer.done():
                        continue  # nobody waits for it any more
                    try:
                        answer, row = look.judge(seen)
                    except Exception as error:
                        look.answer.set_exception(error)
                        continue
                    answers.append((look, answer))
                    if row is not None:
                        rows.append(row)
                await decisions.record(conn, rows)
        except StoreUnavailable as error:
            log.warning("placement waits for the database", error=str(error))
            self._refuse(batch, MayNotPlace("the database cannot be used"))
        except MayNotPlace as error:
            self._refuse(batch, error)
        except Exception as error:
            self._refuse(batch, error)
        else:
            for look, answer in answers:
                if not look.answer.done():
                    look.answer.set_result(answer)

    def _check(self, found: installation.Installation | None) -> None:
        if found is None:
            raise MayNotPlace("the database has no installation yet")
        if found.epoch != self._term.epoch:
            raise MayNotPlace("the database does not know this leader yet")

    @staticmethod
    def _refuse(batch: list[_Look[Any]], error: Exception) -> None:
        for look in batch:
            if not look.answer.done():
                look.answer.set_exception(error)
