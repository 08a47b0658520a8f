"""One ``nebula run`` as a child process, for the demo and for tests that kill it.

It speaks to a given cluster, database and clouds, on ports that stay the same over a restart, so that the
webhook configurations go on being right. Its log is a file; `kill` is SIGKILL, `stop` is SIGTERM.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from app import processes

READY_S = 60.0


class ControllerFailed(RuntimeError):
    """It ended, or did not become ready in time; the message carries the end of its log."""


def _kubelet(port: int) -> dict[str, str]:
    return {"NEBULA_KUBELET_BIND": f"127.0.0.1:{port}", "NEBULA_KUBELET_ADDRESS": "127.0.0.1"}


class Controller:
    """Made once, started as often as wanted. ``clouds`` maps provider names to fake clouds' URLs.

    ``others`` are further entries of ``NEBULA_PROVIDERS``; `providers` is the whole of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kubeconfig: Path,
        database_url: str,
        clouds: Mapping[str, str],
        others: Sequence[str] = (),
        webhook_url: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "nebula.log"
        webhook, health, kubelet = processes.free_ports(3)
        bind = f"127.0.0.1:{webhook}"
        if webhook_url is not None:  # somebody's own API server: it must reach us at its port, on any address
            bind = f":{urlsplit(webhook_url).port or 443}"
        self.health_url = f"http://127.0.0.1:{health}"
        self.kubelet_url = f"https://127.0.0.1:{kubelet}"
        self.webhook_address = f"127.0.0.1:{bind.rpartition(':')[2]}"
        self.providers = " ".join([*(f"{name}=fake,url={url}" for name, url in clouds.items()), *others])
        self._process: subprocess.Popen[bytes] | None = None
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")},
            "NEBULA_PROFILE": "fast",
            "NEBULA_KUBECONFIG": str(kubeconfig),
            "NEBULA_DATABASE_URL": database_url,
            "NEBULA_PROVIDERS": self.providers,
            "NEBULA_WEBHOOK_BIND": bind,
            "NEBULA_WEBHOOK_URL": webhook_url or f"https://127.0.0.1:{webhook}",
            "NEBULA_HEALTH_BIND": f"127.0.0.1:{health}",
            # Somebody's own API server cannot reach us at the loopback interface.
            **({} if webhook_url is not None else _kubelet(kubelet)),
            **(options or {}),
        }

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ControllerFailed("the controller was not started")
        return self._process.pid

    def start(self, *, die_at: str | None = None, wait: bool = True, **options: str) -> None:
        """Start it, and wait until its webhooks are ready. ``die_at``: a step of `app.provisioning.steps`.

        Raises:
            ControllerFailed: it ended, or was not ready within a minute.
        """
        env = self._env | options | ({"NEBULA_DIE_AT": die_at} if die_at else {})
        argv = [sys.executable, "-m", "app.cli", "run"]
        # Our end is SIGKILL for it: one that stands still (`pause`) would heed nothing less.
        self._process = processes.spawn(argv, log=self.log, env=env)
        if wait:
            self.await_ready()

    def await_ready(self, *, within_s: float = READY_S) -> None:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if not self.running:
                raise ControllerFailed(f"the controller has ended:\n{processes.tail(self.log)}")
            try:
                with urllib.request.urlopen(f"{self.health_url}/readyz", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise ControllerFailed(f"the controller is not ready:\n{processes.tail(self.log)}")

    def await_end(self, *, within_s: float = READY_S) -> int:
        """Its exit code once it has ended by itself; -9 after SIGKILL.

        Raises:
            ControllerFailed: it still runs.
        """
        assert self._process is not None
        try:
            return self._process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise ControllerFailed(f"the controller still runs:\n{processes.tail(self.log)}") from None

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._process is not None:
            processes.stop(self._process, grace_s=10, ask=signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        if self._process is None:
            return 0
        processes.stop(self._process, grace_s=20)
        return self._process.returncode

    def pause(self) -> None:
        """SIGSTOP: it neither works nor ends."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
