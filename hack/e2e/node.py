"""One real node beside the control plane: containerd, kubelet, kube-proxy and CoreDNS, in our own namespaces.

All of it runs in the network, mount and process namespace that ``hack.e2e`` made, so that no address, mount,
nftables table or process outlives it. What is not in a namespace is dealt with by hand: cgroups lie below one
folder that the caller names and removes, and the kernel settings that a kubelet insists on are shown to it
as files instead of being changed. Pods are wired by ``ptp``: every packet is routed, so that Services work
without bridge filters. Durations are seconds.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.processes import spawn, stop, tail
from hack.cluster import ControlPlane, certificates
from hack.e2e.images import PAUSE, Archive
from hack.e2e.packages import Programs

ADDRESS = "10.244.255.1"  # the node's, and CoreDNS's
PODS = "10.244.0.0/24"
DOMAIN = "cluster.local"
VOLUMES = 8
STORAGE_CLASS = "local"

_READY_S = 120.0
# What a kubelet would set in the whole kernel; it finds them set.
_KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

_CONTAINERD = """\
version = 2
root = "{home}/containerd/root"
state = "{home}/containerd/state"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{home}/cni"
"""

_COREDNS = """\
{domain}:53 in-addr.arpa:53 {{
  bind {address}
  kubernetes {domain} in-addr.arpa {{
    kubeconfig {kubeconfig}
  }}
  cache 5
}}
"""


class NodeFailed(RuntimeError):
    """A part of the node did not come up, or ended; the message ends with its log."""


@dataclass(slots=True, kw_only=True)
class Node:
    """The node between ``start`` and the end of the namespaces. ``home`` takes its data and logs."""

    plane: ControlPlane
    home: Path
    programs: Path
    packages: Programs
    cgroup: str
    _children: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)

    @staticmethod
    def network() -> None:
        """Give the namespace an address that the control plane can announce. Before anything is started."""
        for words in (
            "link set lo up",
            "link add node0 type bridge",
            f"addr add {ADDRESS}/32 dev node0",
            "link set node0 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def start(self, images: tuple[Archive, ...]) -> None:
        """Start all parts and wait until the node is ready and the images are there.

        Raises:
            NodeFailed: see there.
        """
        (self.home / "cni").mkdir(parents=True)
        (self.home / "kubelet").mkdir()
        self._pretend()
        self._containerd(images)
        self._kubelet()
        # Pods reach the API server and the webhooks' clients reach Pods by routes: sources are rewritten.
        proxy = ["--proxy-mode=nftables", f"--cluster-cidr={PODS}", "--masquerade-all"]
        limits = [
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ]
        self._spawn(
            "kube-proxy",
            self.programs / "kube-proxy",
            f"--kubeconfig={self.plane.kubeconfig}",
            f"--hostname-override={certificates.NODE_NAME}",
            *proxy,
            *limits,
        )
        (self.home / "Corefile").write_text(
            _COREDNS.format(domain=DOMAIN, address=ADDRESS, kubeconfig=self.plane.kubeconfig)
        )
        self._spawn("coredns", self.programs / "coredns", "-conf", self.home / "Corefile")
        self._wait("kubelet", self._is_ready, "the node to be Ready")
        self._volumes()

    def stop(self) -> None:
        """End the parts in order; containers that still run end with the namespace."""
        for name in ("coredns", "kube-proxy", "kubelet", "containerd"):
            if (child := self._children.pop(name, None)) is not None:
                stop(child, grace_s=5.0)

    def check(self) -> None:
        """Raise NodeFailed if a part has ended by itself."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise NodeFailed(f"{name} ended with code {child.returncode}:\n{tail(self.log(name))}")

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    @property
    def socket(self) -> Path:
        return self.home / "containerd.sock"

    def containers(self, *argv: str) -> str:
        """Run ``ctr`` in the kubelet's namespace and return its output."""
        done = subprocess.run(
            [self._found("ctr"), "-a", self.socket, "-n", "k8s.io", *argv],
            capture_output=True,
            text=True,
            check=False,
            env=self.packages.environment(),
        )
        if done.returncode != 0:
            raise NodeFailed(f"ctr {' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    # --- the parts ---

    def _pretend(self) -> None:
        """Show the kubelet the kernel settings it wants. The mounts are seen in this namespace only."""
        for name, value in _KERNEL.items():
            shown = self.home / f"kernel-{name.replace('/', '-')}"
            shown.write_text(f"{value}\n")
            if (real := Path("/proc/sys") / name).exists():
                subprocess.run(["mount", "--bind", shown, real], check=True)

    def _containerd(self, images: tuple[Archive, ...]) -> None:
        (self.home / "containerd.toml").write_text(
            _CONTAINERD.format(home=self.home, socket=self.socket, pause=PAUSE, plugins=self.packages.plugins)
        )
        wiring = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self.home / "cni-addresses"),
                        "ranges": [[{"subnet": PODS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (self.home / "cni" / "10-pods.conflist").write_text(json.dumps(wiring))
        self._spawn("containerd", self._found("containerd"), "-c", self.home / "containerd.toml")

        def answers() -> bool:
            try:
                self.containers("version")
            except NodeFailed:
                return False
            return True

        self._wait("containerd", answers, "containerd to answer")
        for image in images:
            self.containers("images", "import", str(image.file))

    def _kubelet(self) -> None:
        authority = self.plane.kubeconfig.parent / "pki" / "ca.crt"
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": str(authority)},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            "enforceNodeAllocatable": [],
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": str(self.home / "volume-plugins"),
            "podLogsDir": str(self.home / "pod-logs"),
            "staticPodPath": "",
        }
        file = self.home / "kubelet.yaml"
        file.write_text(yaml.safe_dump(config))
        kubeconfig = self.home / "node.kubeconfig"
        certificates.write_kubeconfig(
            kubeconfig, server=self.plane.server, folder=authority.parent, user="node"
        )
        self._spawn(
            "kubelet",
            self.programs / "kubelet",
            f"--config={file}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.home / 'kubelet'}",
            f"--cert-dir={self.home / 'kubelet-pki'}",
            f"--hostname-override={certificates.NODE_NAME}",
            f"--node-ip={ADDRESS}",
        )

    def _volumes(self) -> None:
        """A default storage class and some empty volumes on this machine, as an administrator makes them."""
        objects: list[dict[str, Any]] = [
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {
                    "name": STORAGE_CLASS,
                    "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                },
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            }
        ]
        here = [{"key": "kubernetes.io/hostname", "operator": "In", "values": [certificates.NODE_NAME]}]
        for number in range(VOLUMES):
            place = self.home / "volumes" / str(number)
            place.mkdir(parents=True)
            objects.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": f"local-{number}"},
                    "spec": {
                        "capacity": {"storage": "20Gi"},
                        "accessModes": ["ReadWriteOnce"],
                        "persistentVolumeReclaimPolicy": "Retain",
                        "storageClassName": STORAGE_CLASS,
                        "local": {"path": str(place)},
                        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}},
                    },
                }
            )
        self._kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def _is_ready(self) -> bool:
        found = self._kubectl("get", "node", certificates.NODE_NAME, "--ignore-not-found", "-o", "json")
        conditions = json.loads(found)["status"]["conditions"] if found.strip() else []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    # --- small things ---

    def _spawn(self, name: str, program: Path, *flags: str | Path) -> None:
        self._children[name] = spawn(
            [program, *flags], log=self.log(name), env=self.packages.environment(), cwd=self.home
        )

    def _found(self, name: str) -> Path:
        for folder in self.packages.environment()["PATH"].split(os.pathsep):
            if (Path(folder) / name).exists():
                return Path(folder) / name
        raise NodeFailed(f"no {name}")

    def _kubectl(self, *argv: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            [self.plane.kubectl, f"--kubeconfig={self.plane.kubeconfig}", *argv],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise NodeFailed(f"kubectl {' '.join(argv[:3])}: {done.stderr.strip()}")
        return done.stdout

    def _wait(self, name: str, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not holds():
            self.check()
            if time.monotonic() > deadline_s:
                raise NodeFailed(f"waited {_READY_S:.0f} s for {what}:\n{tail(self.log(name))}")
            time.sleep(0.2)
