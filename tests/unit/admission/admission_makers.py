"""Pods on their way through admission, and what a JSON patch makes of them."""

import copy

from app.admission import rules
from catalog.catalogue import Catalogue
from catalog.offerings import Offerings
from catalog.stock import Stock
from providers.base import Accelerator, Offering, Tier, Traits

GROUP = "nebula.inftyai.com"
GATE = {"name": f"{GROUP}/provider-selection"}
OURS = {"key": f"{GROUP}/provider", "operator": "Exists", "effect": "NoSchedule"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}


def seconds(toleration, seconds_):
    return toleration | {"tolerationSeconds": seconds_}


def opted_in(*, labels=None, annotations=None, gpus=None, **spec):
    """A Pod that asks for nothing but to be ours; a test names only what it is about."""
    container = {"name": "main", "image": "app:1"}
    if gpus is not None:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    metadata = {"name": "a", "namespace": "default", "labels": {f"{GROUP}/enabled": "true", **(labels or {})}}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": [container], **spec}}


def sells(provider, *kinds, account="default", counts=(8,), region="", **sizes):
    """Offerings of one account: each kind in each count."""
    return [
        Offering(
            provider=provider,
            account=account,
            region=region,
            tier=Tier.ON_DEMAND,
            accelerator=Accelerator(type=kind, count=count),
            shape=f"{kind}x{count}",
            meters=(),
            **sizes,
        )
        for kind in kinds
        for count in counts
    ]


def a_stock(*providers, catalogue=None, traits=None, **offers):
    """Accounts that are configured; those named by keyword are open, and have told these offers."""
    known = Offerings()
    traits = traits or Traits(tiers=frozenset({Tier.ON_DEMAND}))
    for provider, rows in offers.items():
        known.put(provider, "default", traits=traits, offerings=rows)
    names = {*providers, *offers}
    return Stock(
        offerings=known,
        catalogue=catalogue or Catalogue(),
        configured=frozenset((name, "default") for name in names),
    )


def applied(pod, *, stock=rules.NOTHING_KNOWN):
    """The Pod as the API server has it after the mutating webhook."""
    verdict = rules.mutate(pod, stock=stock)
    assert verdict.refusals == ()
    changed = copy.deepcopy(pod)
    for operation in verdict.patch:
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        )
        target = changed
        for part in parents:
            target = target[part]
        if operation["op"] == "remove":
            del target[last]
        else:
            assert operation["op"] == "add"
            target[last] = operation["value"]
    return changed
