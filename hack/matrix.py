"""What each cloud can do, as ``docs/providers/README.md`` shows it: made from what its adapter declares.

``python -m hack.matrix`` writes the table into the page; a test fails when they differ. The fake cloud is
what its scenario says, so it has no column. Adapters are opened with a credential that is none: nothing is
sent.
"""

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from providers import capabilities
from providers.base import Completion, MeterKind, Provider, ProviderConfig, ProviderFactory, Traits

PAGE = Path(__file__).resolve().parents[1] / "docs" / "providers" / "README.md"
_BEGIN, _END = "<!-- made by python -m hack.matrix -->\n", "<!-- end -->\n"
_CREDENTIALS = {"RUNPOD_API_KEY": "none"}

_CAPABILITIES: dict[str, type] = {
    "`kubectl logs`": capabilities.StreamsLogs,
    "`kubectl exec`, by the cloud": capabilities.Executes,
    "`kubectl attach`, by the cloud": capabilities.Attaches,
    "exec and port-forward through SSH, where an option asks for it": capabilities.ReachableBySsh,
    "a URL for a port": capabilities.Connects,
    "usage of CPU, memory and GPUs": capabilities.ReportsUsage,
    "starts a workload again on its machine": capabilities.Restarts,
    "tells the exit code where an option asks for it": capabilities.CompletesByOption,
    "pool and Pod options choose the kind of machine": capabilities.Chooses,
    "prepares parts before it rents (private images)": capabilities.Prepares,
    "lists its parts, so that none is left behind": capabilities.HasParts,
    "tells what it charged": capabilities.Bills,
    "tells the prepaid balance": capabilities.HasBalance,
}
_COMPLETION = {
    Completion.CODE: "with its exit code",
    Completion.ENDED: "that it ended",
    Completion.NEVER: "no: no Jobs, `restartPolicy: Always` only",
}
_TRAITS: dict[str, Callable[[Traits], str]] = {
    "capacity types": lambda traits: ", ".join(sorted(traits.tiers)),
    "tells a workload's end": lambda traits: _COMPLETION[traits.completion],
    "longest life of a machine": lambda traits: _time(traits.max_lifetime_s, "none"),
    "machines without accelerator": lambda traits: _yes(not traits.needs_accelerator),
    "egress rules": lambda traits: _yes(traits.enforces_egress),
    "a stop reaches the workload, with its grace": lambda traits: _yes(traits.graceful_stop),
    "the same order may be sent again": lambda traits: _time(traits.replay_for_s, "no"),
    "a lost answer is settled after": lambda traits: _time(traits.settle_after_s, "none"),
    "a list at most every": lambda traits: _time(traits.list_every_s, "none"),
    "calls a second": lambda traits: f"{traits.calls_per_s:g}, bursts of {traits.call_burst}",
    "time to start": lambda traits: f"at most {_time(traits.boot_deadline_s, 'any')}",
    "bills": lambda traits: _billing(traits),
    "options (annotation `cloud.aibrix.ai/<provider>-…`)": lambda traits: (
        ", ".join(f"`{option.name}`" for option in traits.options) or "none"
    ),
}


def table() -> str:
    """The matrix of every installed adapter, in Markdown."""
    return asyncio.run(_table())


def page(text: str) -> str:
    """The page with the matrix of now."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table()}{_END}{after}"


async def _table() -> str:
    opened = [
        await _opened(name) for name in sorted(entry_points(group="nebula.providers").names) if name != "fake"
    ]
    lines = [["", *(f"[{provider.name}]({provider.name}.md)" for provider in opened)]]
    lines.append(["---"] * len(lines[0]))
    lines += [[what, *(tell(provider.traits) for provider in opened)] for what, tell in _TRAITS.items()]
    lines += [
        [what, *(_yes(isinstance(provider, kind)) for provider in opened)]
        for what, kind in _CAPABILITIES.items()
    ]
    await asyncio.gather(*(provider.close() for provider in opened))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


async def _opened(name: str) -> Provider:
    (point,) = entry_points(group="nebula.providers", name=name)
    factory = cast(ProviderFactory, point.load())
    return await factory.open(ProviderConfig(name=name, installation="docs", credentials=_CREDENTIALS))


def _yes(can: bool) -> str:
    return "yes" if can else "–"


def _time(seconds: float | None, none: str) -> str:
    if seconds is None:
        return none
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"


def _billing(traits: Traits) -> str:
    words = []
    for rule in traits.billing:
        kind = rule.kind.value if rule.kind else "all"
        kind = "GPUs" if rule.kind is MeterKind.GPU else kind
        least = f", at least {rule.minimum_s} s" if rule.minimum_s else ""
        words.append(f"{kind} from {rule.starts} to {rule.until}{least}".replace("_", " "))
    return "; ".join(words) or "not declared"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
