"""What a run of the end-to-end test has left on the machine, in whatever way it ended. Nothing is right."""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.e2e.packages import Programs

# What a node makes: the story's bridge, a wire to each Pod, kube-proxy's own interfaces and tables.
_LINKS = ("node0", "veth", "kube-", "nodelocaldns")
_TABLES = "kube-proxy"


def left(
    state: Path, *, cgroups: Sequence[Path], namespaces: frozenset[str], within_s: float = 0
) -> list[str]:
    """Processes, mounts, cgroups, folders and namespaces of the run that are not gone within that time.

    ``namespaces`` are those that it ran in, as ``net:[4026532000]``. One lives on only through a process in
    it, or a mount of it. The kernel ends what is in a process namespace one after the other.
    """
    deadline_s = time.monotonic() + within_s
    while (found := _left(state, cgroups, namespaces)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def _left(state: Path, cgroups: Sequence[Path], namespaces: frozenset[str]) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(state).encode() in (folder / "cmdline").read_bytes():
                found.append(f"process {folder.name}")
        for entry in ("net", "mnt", "pid", "ipc", "uts"):
            with contextlib.suppress(OSError):
                if (namespace := os.readlink(folder / "ns" / entry)) in namespaces:
                    found.append(f"namespace {namespace} of process {folder.name}")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        root, place = line.split()[3:5]
        if str(state) in line or root in namespaces:
            found.append(f"mount {place}")
    found += [f"cgroup {path}" for path in cgroups if path.exists()]
    if state.exists():
        found.append(f"folder {state}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine's own links and nftables tables: a run may add nothing to them."""

    links: frozenset[str]
    tables: frozenset[str]

    @classmethod
    def now(cls, *, packages: Programs) -> "Machine":
        """Raises:
        CalledProcessError, OSError: a tool that lists them failed; nothing is known then.
        """
        listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        links = {line.split(": ")[1].partition("@")[0] for line in listed.splitlines()}
        environment = packages.environment()
        known = subprocess.run(
            ["nft", "list", "tables"], capture_output=True, text=True, check=True, env=environment
        ).stdout
        return cls(links=frozenset(links), tables=frozenset(known.splitlines()))

    def new_on(self, later: "Machine") -> list[str]:
        """What ``later`` has beyond this, of the kinds that a node makes: others use the machine too."""
        links = {each for each in later.links - self.links if each.startswith(_LINKS)}
        tables = {each for each in later.tables - self.tables if _TABLES in each}
        return [f"link {each}" for each in sorted(links)] + [f"nftables {each}" for each in sorted(tables)]
