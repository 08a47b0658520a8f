"""The one cluster of a test session, and kubectl on it."""

import os
import subprocess
from pathlib import Path

from hack.cluster import Cluster


class Kubectl:
    """Runs kubectl against one cluster: ``kubectl("get", "pods", "-A")`` returns what it printed."""

    def __init__(self, cluster: Cluster) -> None:
        self._program = cluster.kubectl
        self._kubeconfig = cluster.kubeconfig

    def __call__(self, *args: str | Path, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Run one command; ``stdin`` is for ``-f -``.

        Raises:
            AssertionError: it failed. The message holds the command and what it wrote to its error output.
        """
        done = self.run(*args, stdin=stdin, timeout_s=timeout_s)
        command = " ".join(map(str, args))
        assert done.returncode == 0, f"kubectl {command}: exit {done.returncode}\n{done.stderr}"
        return done.stdout

    def run(
        self, *args: str | Path, stdin: str | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one command whose failure is of interest."""
        return subprocess.run(
            [self._program, *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | {"KUBECONFIG": str(self._kubeconfig)},
        )
