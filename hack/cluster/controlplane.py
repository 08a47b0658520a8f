"""One local Kubernetes control plane: etcd, API server, controller manager and scheduler as child processes.

Everything listens on loopback, on ports that were free, with certificates of its own. Invariants: whatever
ends a start or this process (an error, Ctrl-C, SIGKILL), no child stays; the API server ends before etcd,
because without etcd it hangs in its shutdown and keeps its port. All durations are seconds.
"""

import atexit
import contextlib
import http.client
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from app.processes import Scratch, free_ports, lock_file, spawn, stop, tail
from hack.cluster import binaries, certificates

_READY_S = 120.0  # on a busy 2-core machine it takes 10
_GRACE_S = 3.0
_SCRATCH_BYTES = 2 << 30  # etcd's data and the audit log of a long test run
_TRIES = 3
_STOP_ORDER = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
_CLIENT_LIMITS = ("--kube-api-qps=500", "--kube-api-burst=1000")  # the stock ones make 20 Pods a second

_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


class ClusterFailed(RuntimeError):
    """A part did not come up, or ended by itself. The message names it and ends with its log."""


class StateInUse(ClusterFailed):
    """Another control plane runs on this state folder: stop that one, or choose another folder."""


class ControlPlane:
    """A control plane that runs between ``start`` and ``stop``. Blocking; ``with`` does both.

    ``state`` keeps certificates, data and logs for the next start; None means a folder in memory, where there
    is room, that ``stop`` removes. ``audit`` writes a line per request to ``audit_log`` (level Metadata).
    ``node_grace_s`` is how long a node may be silent until its Pods are evicted; None is the stock value.
    Further flags go to each part as they are, after ours, so that they win.
    """

    def __init__(
        self,
        *,
        state: Path | None = None,
        programs: Path | None = None,
        audit: bool = True,
        node_grace_s: int | None = None,
        apiserver_flags: Sequence[str] = (),
        controller_manager_flags: Sequence[str] = (),
        scheduler_flags: Sequence[str] = (),
    ) -> None:
        self._given = state
        self._programs = programs
        self._audit = audit
        self._apiserver_flags = tuple(apiserver_flags)
        grace = (
            [f"--node-monitor-grace-period={node_grace_s}s", "--node-monitor-period=1s"]
            if node_grace_s
            else []
        )
        self._controller_manager_flags = (*grace, *controller_manager_flags)
        self._scheduler_flags = tuple(scheduler_flags)
        self._scratch: Scratch | None = None
        self._lock: int | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port = self._peer_port = self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig, certificates embedded."""
        return self._state / "admin.kubeconfig"

    @property
    def kubectl(self) -> Path:
        return self._bin / "kubectl"

    @property
    def audit_log(self) -> Path:
        return self._state / "audit.log"

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the parts that run, by program name."""
        return {name: child.pid for name, child in self._children.items() if child.poll() is None}

    def log(self, program: str) -> Path:
        """Return the log of one part, by program name."""
        return self._state / f"{program}.log"

    def start(self) -> None:
        """Start all parts and wait until Pods can be made (the default service account exists).

        Raises:
            hack.cluster.binaries.BuildFailed, hack.cluster.golang.NoGo: the programs are not there.
            StateInUse, ClusterFailed: see there. Nothing runs then.
        """
        if self._children:
            raise RuntimeError("started already")
        self._bin = self._programs or binaries.build()
        atexit.register(self.stop)
        try:
            self._prepare()
            for attempt in range(1, _TRIES + 1):
                self._etcd_port, self._peer_port, self.port = free_ports(3)
                try:
                    self._start_parts()
                    return
                except ClusterFailed as error:
                    if "address already in use" not in str(error) or attempt == _TRIES:
                        raise
                    self._end(_STOP_ORDER)  # somebody was faster: other ports
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all parts in their order and wait until they are gone. May be called again."""
        self._end(_STOP_ORDER)
        atexit.unregister(self.stop)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def stop_apiserver(self) -> None:
        """End the API server alone, as an outage; ``start_apiserver`` brings it back at the same port."""
        self._end(("kube-apiserver",))

    def start_apiserver(self) -> None:
        """Start the API server again and wait until it is ready."""
        self._spawn_apiserver()
        self._wait("kube-apiserver", self._answers("/readyz"))

    def restart_apiserver(self) -> None:
        """End the API server and start it again at the same port; watches break, objects stay."""
        self.stop_apiserver()
        self.start_apiserver()

    def check(self) -> None:
        """Raise ClusterFailed if a part has ended by itself."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise ClusterFailed(f"{name} ended with code {child.returncode}:\n{tail(self.log(name))}")

    @property
    def _state(self) -> Path:
        if self._given is not None:
            return self._given.absolute()
        if self._scratch is None:
            raise RuntimeError("the control plane does not run")
        return self._scratch.path

    @property
    def _pki(self) -> Path:
        return self._state / "pki"

    def _prepare(self) -> None:
        if self._given is None:
            self._scratch = Scratch("cluster", need_bytes=_SCRATCH_BYTES)
        else:
            self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_file(self._state / "lock")
        if self._lock is None:
            owner = (self._state / "lock").read_text()
            raise StateInUse(f"process {owner or 'unknown'} runs a control plane in {self._state}")
        certificates.write_all(self._pki)
        (self._state / "audit-policy.yaml").write_text(_AUDIT_POLICY)

    def _start_parts(self) -> None:
        certificates.write_kubeconfig(self.kubeconfig, server=self.server, folder=self._pki)
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        self._spawn(
            "etcd",
            f"--data-dir={self._state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self._spawn_apiserver()
        self._wait("kube-apiserver", self._answers("/readyz"))
        self._spawn_controller_manager()
        self._spawn_scheduler()
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait("kube-controller-manager", self._answers(account))

    def _spawn_apiserver(self) -> None:
        pki = self._pki
        audit = [
            f"--audit-policy-file={self._state / 'audit-policy.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-maxsize=2000",
        ]
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",  # it would publish the loopback address, which is refused
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={certificates.SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            # As on OpenShift: who owns what may only be said by those who may touch the owner.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",  # else it resolves the node's name
            f"--requestheader-client-ca-file={pki / 'ca.crt'}",
            f"--requestheader-allowed-names={certificates.FRONT_PROXY_NAME}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
            "--enable-aggregator-routing=true",  # a webhook's Service is dialled at its endpoints
            *(audit if self._audit else []),
            *self._apiserver_flags,
        )

    def _spawn_controller_manager(self) -> None:
        pki = self._pki
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            "--secure-port=0",  # nobody asks it anything
            f"--service-account-private-key-file={pki / 'sa.key'}",
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--cluster-signing-cert-file={pki / 'ca.crt'}",
            f"--cluster-signing-key-file={pki / 'ca.key'}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            *_CLIENT_LIMITS,
            *self._controller_manager_flags,
        )

    def _spawn_scheduler(self) -> None:
        self._spawn(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig}",
            "--secure-port=0",
            "--leader-elect=false",
            *_CLIENT_LIMITS,
            *self._scheduler_flags,
        )

    def _spawn(self, name: str, *flags: str) -> None:
        log = self.log(name)
        log.write_bytes(b"")
        self._children[name] = spawn([self._bin / name, *flags], log=log, cwd=self._state)

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            if (child := self._children.get(name)) is not None:
                stop(child, grace_s=_GRACE_S)
                del self._children[name]

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                raise ClusterFailed(f"{name} was not ready after {_READY_S:.0f} s:\n{tail(self.log(name))}")
            time.sleep(0.05)

    def _answers(self, path: str) -> Callable[[], bool]:
        """Return a question to the API server: is this path there?"""
        context = ssl.create_default_context(cafile=str(self._pki / "ca.crt"))
        context.load_cert_chain(self._pki / "admin.crt", self._pki / "admin.key")

        def ask() -> bool:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=10)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", path)
                return connection.getresponse().status == 200
            return False

        return ask
