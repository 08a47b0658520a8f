"""Seven minutes and more without a leader, in real time: `make soak`; about nine minutes.

Stock node grace, stock tolerations, and our own durations as in production. Everybody else's Pod is evicted
from our silent node after some six minutes; ours must not be.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster import ControlPlane
from tests.cluster.whole.nobody_leads import nobody_leads

SEVEN_MINUTES_S = 7 * 60.0
EVICTED_WITHIN_S = 12 * 60.0  # 50 s until a node is called silent, then 300 s of tolerations


@pytest.fixture
def stock() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        yield started


async def test_no_pod_is_evicted_in_seven_minutes_without_a_leader(
    stock: ControlPlane, database_url: str, tmp_path: Path
) -> None:
    await nobody_leads(
        stock,
        tmp_path,
        database=database_url,
        beat_s=5.0,
        at_least_s=SEVEN_MINUTES_S,
        within_s=EVICTED_WITHIN_S,
        options={"NEBULA_PROFILE": "production"},
        tell=lambda line: print(f"soak: {line}", flush=True),
    )
