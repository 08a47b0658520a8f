"""The options of an account of RunPod, from ``NEBULA_PROVIDERS``, checked once."""

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

from providers.base import ProviderConfig
from providers.runpod.refusals import CAPACITY

URL: Final = "https://api.runpod.io"
_HOURS_A_MONTH = 730
_DEFAULTS: Final = {
    "url": URL,
    "graphql_url": "",
    "cloud": "secure",
    "key_env": "RUNPOD_API_KEY",
    "disk_usd_per_gb_month": "0.10",
    "pull_window_s": "300",  # a fresh registry login was seen to work only after four minutes
    "calls_per_s": "1",
    "call_burst": "20",
    "list_every_s": "5",
    "job_every_s": "15",
    "capacity_texts": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``disk_usd`` is dollars an hour for a GB. ``capacity_texts`` are those known and those configured."""

    url: str
    graphql_url: str
    cloud: str
    key_env: str
    disk_usd: Decimal
    pull_window_s: float
    calls_per_s: float
    call_burst: int
    list_every_s: float
    job_every_s: float
    capacity_texts: tuple[str, ...]


def checked(config: ProviderConfig) -> Options:
    """Raises:
    ValueError: an option is unknown or wrong; it is named.
    """
    given = config.options
    if unknown := sorted(set(given) - set(_DEFAULTS)):
        raise ValueError(f"no such option: {', '.join(unknown)} (known: {', '.join(sorted(_DEFAULTS))})")
    value = _DEFAULTS | dict(given)
    for name in ("url", "graphql_url"):
        if value[name] and not value[name].startswith(("http://", "https://")):
            raise ValueError(f"option {name} must begin with https://")
    if value["url"].rstrip("/").endswith("/v2"):
        raise ValueError("option url is without /v2")
    cloud = value["cloud"].lower()
    if cloud not in ("secure", "community"):
        raise ValueError(f"option cloud must be secure or community, not {value['cloud']!r}")
    if not value["key_env"]:
        raise ValueError("option key_env must name a variable")
    return Options(
        url=value["url"],
        graphql_url=value["graphql_url"] or value["url"].rstrip("/") + "/graphql",
        cloud=cloud,
        key_env=value["key_env"],
        disk_usd=_price(value["disk_usd_per_gb_month"]) / _HOURS_A_MONTH,
        pull_window_s=_number("pull_window_s", value["pull_window_s"]),
        calls_per_s=_number("calls_per_s", value["calls_per_s"]),
        call_burst=max(1, int(_number("call_burst", value["call_burst"]))),
        list_every_s=_number("list_every_s", value["list_every_s"]),
        job_every_s=_number("job_every_s", value["job_every_s"]),
        # An option holds no blanks, so a text has + for them.
        capacity_texts=(
            *CAPACITY,
            *(text.replace("+", " ") for text in value["capacity_texts"].split("|") if text),
        ),
    )


def _price(text: str) -> Decimal:
    try:
        usd = Decimal(text)
    except InvalidOperation:
        usd = Decimal(0)
    if not (usd.is_finite() and usd > 0):
        raise ValueError("option disk_usd_per_gb_month must be dollars above 0, such as 0.10")
    return usd


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"option {name} must be a number above 0")
    return number
