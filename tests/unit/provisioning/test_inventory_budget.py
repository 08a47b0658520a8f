"""Calls to a cloud: terminate before rent before list, and never more than it allows."""

import asyncio

import pytest

from app.inventory.budget import CallBudget, Urgency


@pytest.mark.field_case("FC-107")
async def test_the_most_urgent_waiter_goes_first():
    budget = CallBudget(rate=50, burst=1)
    await budget.take(Urgency.LIST)
    order: list[Urgency] = []

    async def call(urgency: Urgency) -> None:
        await budget.take(urgency)
        order.append(urgency)

    async with asyncio.TaskGroup() as tasks:
        for urgency in (Urgency.LIST, Urgency.LIST, Urgency.RENT, Urgency.TERMINATE):
            tasks.create_task(call(urgency))

    assert order == [Urgency.TERMINATE, Urgency.RENT, Urgency.LIST, Urgency.LIST]


async def test_a_burst_passes_at_once_and_the_rest_at_the_rate():
    budget = CallBudget(rate=100, burst=3)
    loop = asyncio.get_running_loop()
    began = loop.time()

    for _ in range(8):
        await budget.take(Urgency.RENT)

    assert loop.time() - began >= 0.045  # five calls over the burst, at a hundred a second


async def test_a_pause_holds_even_terminates():
    budget = CallBudget(rate=1000, burst=10)
    budget.pause(0.1)
    loop = asyncio.get_running_loop()
    began = loop.time()

    await budget.take(Urgency.TERMINATE)

    assert loop.time() - began >= 0.09


async def test_a_cancelled_waiter_gives_its_turn_away():
    budget = CallBudget(rate=20, burst=1)
    await budget.take(Urgency.RENT)
    waiting = asyncio.create_task(budget.take(Urgency.TERMINATE))
    next_in_line = asyncio.create_task(budget.take(Urgency.LIST))
    await asyncio.sleep(0)

    waiting.cancel()

    await asyncio.wait_for(next_in_line, 5)
