"""The story, in its order. Each step is a function; its docstring says what must hold."""

from collections.abc import Callable

from hack.e2e.steps import breaking, leaving, releases, using
from hack.e2e.story import Story

STEPS: dict[str, Callable[[Story], None]] = {
    "install": using.install,
    "idle": using.idle,
    "refusals": using.refusals,
    "fake-cloud": using.fake_cloud,
    "workload": using.workload,
    "streams": using.streams,
    "helm-test": using.helm_test,
    "cost": using.cost,
    "meddled": breaking.meddled,
    "leader-killed": breaking.leader_killed,
    "postgres-killed": breaking.postgres_killed,
    "database-refuses": breaking.database_refuses,
    "eviction": breaking.eviction,
    "upgrade": releases.upgrade,
    "restored": breaking.restored,
    "uninstall-refused": leaving.uninstall_refused,
    "drained": leaving.drained,
    "adopts": leaving.adopts,
    "abandoned": leaving.abandoned,
    "rights": leaving.rights,
    "cleared": leaving.cleared,
    "previous": releases.previous,
}
NAMES = tuple(STEPS)
