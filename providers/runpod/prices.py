"""What RunPod's catalogue of cards says -> offerings. Pure.

A price is for one card; how many may be had in one machine is told for each of the two clouds. A price that
is zero or absurd is unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from providers.base import Accelerator, Meter, MeterKind, Offering, Tier
from providers.runpod.orders import COMMUNITY
from providers.runpod.wire import Gpu, Gpus

_COUNT_MAX = 64
_USD_MAX = Decimal(1000)
_AVAILABLE = {"NONE": False, "LOW": True, "MEDIUM": True, "HIGH": True}


def offerings_of(
    gpus: Gpus, *, provider: str, account: str, names: Mapping[str, str], disk_usd: Decimal
) -> Sequence[Offering]:
    """Data centres before the marketplace. ``names`` leads from RunPod's ids to our accelerators.

    ``disk_usd`` is dollars an hour for a GB of disk; how much is the request's to say.
    """
    return [
        Offering(
            provider=provider,
            account=account,
            region="",
            tier=Tier.ON_DEMAND,
            accelerator=Accelerator(type=names.get(gpu.id) or name_of(gpu.id), count=count),
            shape=prefix + gpu.id,
            meters=(
                Meter(kind=MeterKind.GPU, quantity=Decimal(count), usd=usd),
                Meter(kind=MeterKind.DISK, quantity=Decimal(0), usd=disk_usd),
            ),
            available=_AVAILABLE.get(gpu.availability or ""),
            stock=(gpu.availability or "").lower(),
        )
        for prefix, gpu, most, usd in _sold(gpus)
        for count in range(1, most + 1)
    ]


def name_of(gpu_id: str) -> str:
    """A name that a Pod's label can hold, for a card that the catalogue does not name."""
    short = re.sub(r"^(NVIDIA|AMD|Tesla)\s+|GeForce\s+|\s+Generation$", "", gpu_id)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-._")[:63] or "unnamed"


def _sold(gpus: Gpus) -> Iterator[tuple[str, Gpu, int, Decimal | None]]:
    for gpu in gpus.gpus:
        if gpu.secure:
            yield "", gpu, _most(gpu.max_count.secure), _usd(gpu.price.secure)
    for gpu in gpus.gpus:
        if gpu.community:
            yield COMMUNITY, gpu, _most(gpu.max_count.community), _usd(gpu.price.community)


def _most(count: int) -> int:
    return min(max(count, 1), _COUNT_MAX)


def _usd(price: Decimal | None) -> Decimal | None:
    return price if price is not None and 0 < price <= _USD_MAX else None
