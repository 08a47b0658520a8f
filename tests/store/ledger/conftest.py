"""A ledger on each kind of server."""

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.store.ledger.world import Books


@pytest.fixture
async def books(engine: AsyncEngine) -> Books:
    return await Books(engine).open()
