"""What a whole test session shares. Nothing starts before a test asks for it."""

from collections.abc import Iterator

import hypothesis
import pytest
from pytest_postgresql import factories
from pytest_postgresql.executors import NoopExecutor

from app.store.devserver import DevPostgres
from app.telemetry import logs
from hack.cluster import Cluster, obtain
from tests.support import postgres
from tests.support.cluster import Kubectl

# The default renderer would format every logged exception with its locals, for a tenth of a second each.
logs.configure(level="info", style="json")

# Of a machine that is busy otherwise nothing is to be concluded: neither from a slow example nor from few.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Kubernetes cluster: ours, or the one that NEBULA_TEST_KUBECONFIG names."""
    with obtain() as found:
        yield found


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(cluster)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[DevPostgres]:
    """The session's Postgres. A test that stops or kills it takes one of its own instead."""
    with postgres.server() as started:
        yield started


@pytest.fixture(scope="session")
def postgres_base(postgres_server: DevPostgres) -> postgres.Base:
    return postgres.base(postgres_server)


database_template = factories.postgresql_noproc(
    depends_on="postgres_base", dbname="nebula", load=[postgres.migrate_template]
)


@pytest.fixture
def database_url(postgres_server: DevPostgres, database_template: NoopExecutor) -> Iterator[str]:
    """The URL (postgresql+asyncpg) of a migrated database that this test alone uses."""
    with postgres.clone(postgres_server, database_template) as url:
        yield url
