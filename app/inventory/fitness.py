"""Whether a cloud can run a workload at all: its adapter's word, and what we need of it ourselves. Pure."""

from providers.base import Provider, Workload
from providers.capabilities import Attaches, Executes


def refuses(provider: Provider, workload: Workload) -> str | None:
    """Why this cloud can never run it; None if it can."""
    if workload.needs_commands and not isinstance(provider, Executes):
        return (
            "exec probes and hooks cannot be run here: use httpGet, tcpSocket or sleep, or another provider"
        )
    if (workload.stdin or workload.terminal) and not isinstance(provider, Attaches):
        return "nobody can attach to a container here: remove stdin and tty, or use another provider"
    return provider.validate(workload)
