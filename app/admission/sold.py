"""What is refused because no cloud could ever rent it out: accelerators, sizes and options that do not exist.

Only what is known for certain refuses: see `catalog.stock`. The rest is gated, and placement says why.
"""

import re
from collections.abc import Mapping
from typing import Any

from app import workload
from app.api.keys import ACCELERATOR_TYPE_LABEL, AIBRIX_GROUP, GPU_RESOURCE
from catalog.sizes import RESOURCES, Amounts
from catalog.stock import Stock, near
from providers.base import Accelerator, OptionSpec

Obj = Mapping[str, Any]
_COUNTS_SHOWN = 8


def unsold(pod: Obj, *, accelerator: Accelerator | None, stock: Stock) -> list[str]:
    """Why nothing that this Pod asks for could be had anywhere."""
    if accelerator is not None and (missing := _accelerator(accelerator, stock=stock)):
        return [missing]
    return _sizes(pod, accelerator=accelerator, stock=stock)


def not_sold_here(accelerator: Accelerator | None, *, stock: Stock) -> list[str]:
    """A warning about what only clouds that are not configured have: the Pod would wait, and for what."""
    if accelerator is None or not (clouds := stock.only_elsewhere(accelerator)):
        return []
    return [
        f"no configured provider has {accelerator.count} {GPU_RESOURCE} of type {accelerator.type} in one"
        f" machine: the Pod stays gated until one that has is configured (known: {', '.join(clouds)})"
    ]


def bad_options(options: Mapping[str, str], *, stock: Stock) -> list[str]:
    """Options that the cloud they are for does not have, or not with that value.

    An option of a provider that is not configured, or not open yet, is nobody's and is let through.
    """
    found = []
    for name, value in sorted(options.items()):
        provider = _provider_of(name, stock=stock)
        accounts = stock.accounts(provider) if provider else ()
        if not provider or not accounts:
            continue
        option = name.removeprefix(f"{provider}-")
        specs = {spec.name: spec for offers in accounts for spec in offers.traits.options}
        if (why := _bad_option(option, value, specs=specs, provider=provider)) is not None:
            found.append(f"annotation {AIBRIX_GROUP}/{name}: {why}")
    return found


def _accelerator(accelerator: Accelerator, *, stock: Stock) -> str | None:
    missing = stock.unsold(accelerator)
    if missing is None:
        return None
    if missing.counts:
        counts = [str(count) for count in missing.counts]
        shown = ", ".join(counts[:_COUNTS_SHOWN]) + (", …" if len(counts) > _COUNTS_SHOWN else "")
        return (
            f"{accelerator.count} {GPU_RESOURCE} of type {accelerator.type}: no cloud has so many in one"
            f" machine; ask for one of {shown}"
        )
    if missing.near:
        hint = f"did you mean {' or '.join(missing.near)}?"
    else:
        hint = f"known: {', '.join(missing.known)}"
    return f'label {ACCELERATOR_TYPE_LABEL}: no cloud has an accelerator "{accelerator.type}"; {hint}'


def _sizes(pod: Obj, *, accelerator: Accelerator | None, stock: Stock) -> list[str]:
    containers = pod["spec"].get("containers") or ()
    if not containers:
        return []
    try:
        asked = Amounts(**workload.amounts_of(containers[0])._asdict())
    except workload.Unsupported as error:
        return [str(error)]
    most = stock.too_small(accelerator, asked)
    if most is None:
        return []
    of = f" with {accelerator}" if accelerator else ""
    above = asked.exceeding(most)
    field = f"spec.containers[{containers[0].get('name')}].resources"
    if not above:
        return [f"{field}: no machine{of} has all of it together: ask for less"]
    return [
        f"{field}[{RESOURCES[name]}]: no machine{of} has so much: ask for at most {most.shown(name)}"
        for name in above
    ]


def _provider_of(name: str, *, stock: Stock) -> str | None:
    """The configured provider whose option it is: of two that fit (``a`` and ``a-b``), the longer name."""
    providers = {provider for provider, _account in stock.configured}
    return max((each for each in providers if name.startswith(f"{each}-")), key=len, default=None)


def _bad_option(option: str, value: str, *, specs: Mapping[str, OptionSpec], provider: str) -> str | None:
    spec = specs.get(option)
    if spec is None:
        alike = near(option, specs)
        if alike:
            return f"{provider} has no option {option!r}; did you mean {' or '.join(alike)}?"
        known = f"it has {', '.join(sorted(specs))}" if specs else "it has none"
        return f"{provider} has no option {option!r} ({known}); remove it"
    if not re.fullmatch(spec.pattern, value):
        return f"{value[:64]!r} does not fit {option} ({spec.meaning}); it must match {spec.pattern}"
    return None
