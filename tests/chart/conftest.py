"""Both majors of Helm, built once like the cluster's programs, and what they make of the chart."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster import binaries

CHART = Path(__file__).resolve().parents[2] / "chart"
NAMESPACE = "nebula-system"

# A Helm that is built from its modules alone knows of no newer Kubernetes than 1.20.
KUBERNETES = ("--kube-version", binaries.kubernetes_version())

Obj = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Helm:
    """One major version."""

    program: Path

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.program, *argv], capture_output=True, text=True, check=False, timeout=60)

    def text(self, values: Obj | None = None, *, more: tuple[str, ...] = ()) -> str:
        """The rendered release, as it would be installed; fails with what Helm says."""
        done = self.template(values, more=more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def template(
        self, values: Obj | None = None, *, more: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        argv = ["template", "nebula", str(CHART), "--namespace", NAMESPACE, *KUBERNETES, *more]
        return self.run(*argv, *(("--set-json", _sets(values)) if values else ()))

    def objects(self, values: Obj | None = None, *, more: tuple[str, ...] = ()) -> list[Obj]:
        return [each for each in yaml.safe_load_all(self.text(values, more=more)) if each]


def _sets(values: Obj) -> str:
    return ",".join(f"{key}={json.dumps(value)}" for key, value in values.items())


@pytest.fixture(scope="session")
def helm_programs() -> Path:
    return binaries.build(binaries.HELM)


@pytest.fixture(scope="session")
def helm(helm_programs: Path) -> Helm:
    """The newest one."""
    return Helm(helm_programs / "helm4")


@pytest.fixture(params=["helm3", "helm4"])
def each_helm(request: pytest.FixtureRequest, helm_programs: Path) -> Helm:
    return Helm(helm_programs / request.param)
