"""Every option of the controller, from flags and ``NEBULA_*`` variables, checked once, all errors listed.

A flag wins over its variable, a variable over the profile, the profile over the default. Durations are
seconds as `float`; each has a floor below which it is refused.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

ENV_PREFIX = "NEBULA_"

# Tests and the demo live by these: the same code, with every wait shortened. They are not safe with a real
# cloud, whose lists lag by more than two seconds.
FAST: dict[str, Any] = {
    "lease_duration_s": 3.0,
    "lease_deadline_s": 2.0,
    "lease_renew_s": 0.5,
    "send_window_s": 2.0,
    "settle_after_s": 2.0,
    "call_timeout_s": 2.0,
    "backoff_base_s": 0.05,
    "backoff_max_s": 2.0,
    "unknown_timeout_floor_s": 5.0,
    "block_jitter_s": 0.5,
    "retry_offset_s": 0.5,
    "first_seen_grace_s": 0.5,
    "stale_retry_s": 0.5,
    "unbound_after_s": 5.0,
    "restart_base_s": 1.0,
    "restart_max_s": 4.0,
    "restart_reset_s": 20.0,
    "silence_s": 2.0,
    "list_busy_s": 0.2,
    "list_rest_s": 1.0,
    "offers_every_s": 1.0,
    "ledger_every_s": 0.2,
    "bill_every_s": 1.0,
    "bill_settle_s": 1.0,
    "dead_man_s": 600.0,
    "sweep_every_s": 0.5,
    "sweep_margin_s": 1.0,
    "sweep_ending_s": 10.0,
    "sweep_launch_s": 10.0,
    "sweep_report_only_s": 0.05,
    "sweep_part_grace_s": 2.0,
}


DEAD_MAN_TIMES = 10  # a machine's own limit is so far above the times in which we notice that we are away


class SettingsError(ValueError):
    """Options that cannot be used; ``errors`` holds one line for each, naming flag and variable."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """One configured provider account: ``name[/account][=adapter][,key=value…]``."""

    name: str
    account: str
    adapter: str
    options: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.account)


_ENTRY = re.compile(
    r"(?P<name>[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?)(/(?P<account>[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?))?"
    r"(=(?P<adapter>[a-z][a-z0-9_]*))?(?P<options>(,[a-z][a-z0-9_]*=[^,\s]*)*)"
)


def parse_providers(text: str) -> tuple[ProviderEntry, ...]:
    """Entries apart by white space: ``modal=fake,url=http://127.0.0.1:9001 aws=fake,url=…``.

    Raises:
        ValueError: an entry does not have that form, or one account is named twice.
    """
    entries = []
    for word in text.split():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not NAME[/ACCOUNT][=ADAPTER][,KEY=VALUE...]")
        pairs = [pair.split("=", 1) for pair in match["options"].split(",") if pair]
        entries.append(
            ProviderEntry(
                name=match["name"],
                account=match["account"] or "default",
                adapter=match["adapter"] or match["name"],
                options=dict(pairs),
            )
        )
    keys = [entry.key for entry in entries]
    if twice := sorted({f"{name}/{account}" for name, account in keys if keys.count((name, account)) > 1}):
        raise ValueError(f"named twice: {', '.join(twice)}")
    return tuple(entries)


def entries_text(entries: tuple[ProviderEntry, ...]) -> str:
    """What `parse_providers` reads back."""
    return " ".join(
        f"{entry.name}{'' if entry.account == 'default' else f'/{entry.account}'}={entry.adapter}"
        + "".join(f",{key}={value}" for key, value in entry.options.items())
        for entry in entries
    )


Seconds = Annotated[float, Field(ge=0.05, allow_inf_nan=False)]
Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]*\]|[0-9A-Za-z.-]*):[0-9]{1,5}$")]


class Settings(BaseModel):
    """What one replica runs with. A field ``some_name`` is ``--some-name`` and ``NEBULA_SOME_NAME``."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    profile: Literal["production", "fast"] = Field(
        "production", description="`fast` shortens every wait; for tests and demos against simulators only."
    )
    dev: bool = Field(
        False,
        description="Bring an embedded Postgres and a fake cloud, and apply the CRDs. Never in a cluster.",
    )
    dev_dir: str | None = Field(
        None,
        description="Where --dev keeps its database and its fake cloud; by default the user's data folder.",
    )

    database_url: str | None = Field(
        None, repr=False, description="postgresql://user:password@host:port/name, required without --dev."
    )
    direct_database_url: str | None = Field(
        None,
        repr=False,
        description="For migrations, backup and restore, where database-url goes through a pooler.",
    )
    database_user: str | None = Field(
        None, description="Takes the place of the user in the database URLs; any characters."
    )
    database_password: str | None = Field(
        None, repr=False, description="Takes the place of the password in the database URLs; any characters."
    )
    report_role: str | None = Field(
        None, description="A role of the database that may read the reports, and nothing else; it must exist."
    )
    database_pool: int = Field(10, ge=2, le=100, description="Connections to Postgres for each replica.")
    database_timeout_s: Seconds = Field(10.0, description="How long one statement may take.")

    providers: tuple[ProviderEntry, ...] = Field(
        (), description="Accounts to use: NAME[/ACCOUNT][=ADAPTER][,KEY=VALUE...], apart by spaces."
    )
    catalog_dir: str | None = Field(
        None, description="Folder of ADAPTER.csv files, each in the place of ours of that name."
    )

    kubeconfig: str | None = Field(None, description="Default: in-cluster, else the usual kubeconfig rules.")
    namespace: str = Field("nebula-system", description="Where the Lease and our Secrets live.")
    identity: str | None = Field(
        None, description="This replica's name in the Lease. Default: host name and pid."
    )
    webhook_bind: Address = Field(":9443", description="Where the admission webhooks listen.")
    webhook_url: str | None = Field(
        None, description="https URL under which the API server reaches them; default: the Service."
    )
    webhook_service: str = Field(
        "nebula-webhook-service", description="The Service in front of the webhooks."
    )
    kubelet_bind: Address = Field(":10250", description="Where kubectl logs, exec and their like arrive.")
    kubelet_address: str | None = Field(
        None,
        description="This replica's IP address, at which the API server reaches kubelet-bind; without it"
        " there is no kubectl logs and exec.",
    )
    kubelet_client_ca_file: str | None = Field(
        None,
        description="CA of the API server's kubelet client. Default: ConfigMap"
        " kube-system/extension-apiserver-authentication.",
    )
    kubelet_idle_s: Seconds = Field(
        14_400.0, description="A session whose client is silent for so long is ended."
    )
    output_tail_bytes: int = Field(
        262_144,
        ge=4096,
        le=4_194_304,
        description="Output that is kept of each Pod once its machine is gone.",
    )
    output_total_bytes: int = Field(
        67_108_864, ge=1_048_576, description="The same for all Pods, compressed; the oldest goes first."
    )
    health_bind: Address = Field(":8081", description="/healthz, /readyz and /metrics.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least to log.")
    log_format: Literal["json", "console"] = Field("json", description="How log lines look.")

    lease_duration_s: Seconds = Field(15.0, description="How long others respect a silent leader.")
    lease_deadline_s: Seconds = Field(10.0, description="How long a leader leads without renewing.")
    lease_renew_s: Seconds = Field(2.0, description="How often the leader renews.")
    send_window_s: Annotated[float, Field(ge=0.5, le=30.0)] = Field(
        30.0, description="How long after its intent a create may still be sent; at most 30 s."
    )
    settle_after_s: Seconds | None = Field(
        None, description="Replaces every adapter's own settling time. Only for simulators."
    )
    call_timeout_s: Seconds | None = Field(None, description="Replaces every adapter's own call time-out.")
    boot_deadline_s: Seconds | None = Field(
        None, description="Replaces every adapter's own time in which a rented machine must have started."
    )
    backoff_base_s: Seconds = Field(1.0, description="The first wait after a failure.")
    backoff_max_s: Seconds = Field(60.0, description="The longest wait after failures.")
    unknown_timeout_floor_s: Seconds = Field(
        60.0, description="Raises a pool's shorter failover.unknownTimeout."
    )
    block_jitter_s: Seconds = Field(30.0, description="Random part added to each block.")
    retry_offset_s: Seconds = Field(30.0, description="Spread of the Pods that wait for one block.")
    first_seen_grace_s: Seconds = Field(15.0, description="How long a claim may wait for its Pod to be seen.")
    stale_retry_s: Seconds = Field(
        5.0, description="How often a Pod looks whether an older one's claim is gone."
    )
    unbound_after_s: Seconds = Field(120.0, description="A placed Pod not bound by then is released.")
    restart_base_s: Seconds = Field(
        10.0, description="CrashLoopBackOff: the first wait, and an owner's between two machines."
    )
    restart_max_s: Seconds = Field(300.0, description="CrashLoopBackOff: the longest wait.")
    restart_reset_s: Seconds = Field(600.0, description="A workload that ran for so long was in no loop.")
    silence_s: Seconds = Field(
        60.0, description="A cloud without a whole list for so long is shown as silent."
    )
    list_busy_s: Seconds = Field(1.0, description="How often a cloud is listed while something changes.")
    list_rest_s: Seconds = Field(15.0, description="How often a cloud is listed at rest.")
    offers_every_s: Seconds = Field(
        300.0, description="How often a cloud is asked what it offers, and at which price."
    )
    ledger_every_s: Seconds = Field(
        5.0, description="How often what runs is written into the ledger, and budgets are looked at."
    )
    bill_every_s: Seconds = Field(
        3600.0, description="How often a cloud that tells its bill is asked for it."
    )
    bill_settle_s: Seconds = Field(
        7200.0, description="How long after a machine's end its bill is believed to be whole."
    )
    close_after_s: Seconds = Field(
        259_200.0, description="How long after a month's end it is closed: later news are corrections."
    )
    segments_keep_months: Annotated[int, Field(ge=0)] = Field(
        13,
        description="Single charges of closed months are kept for so many months, their sums for ever;"
        " 0: charges too.",
    )
    budget_look_ahead_s: Seconds = Field(
        3600.0, description="A NodePool's budget counts what runs and is promised for so much longer."
    )
    dead_man_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        21600.0,
        description="A batch machine that nobody extends for so long ends by itself, if it can; 0: off.",
    )
    sweep_mode: Literal["sweep", "report"] = Field(
        "sweep", description="`report`: orphans are found and told, and ended only when a person approves."
    )
    sweep_every_s: Seconds = Field(60.0, description="How often what the clouds show is judged.")
    sweep_margin_s: Seconds = Field(
        300.0, description="Added to a cloud's longest create and settling time: an orphan's grace."
    )
    sweep_ending_s: Seconds = Field(600.0, description="A machine that takes longer to end is told of.")
    sweep_launch_s: Seconds = Field(300.0, description="A claim without a machine for longer is told of.")
    sweep_report_only_s: Seconds = Field(
        3600.0, description="How long after an install or upgrade nothing is ended unapproved."
    )
    sweep_max_machines: int = Field(5, ge=0, description="More orphans at once than this are not ended,")
    sweep_max_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.10, description="or than this share of our machines, whichever is more; a person approves."
    )
    sweep_approval_s: Seconds = Field(3600.0, description="How long an approval counts.")
    sweep_part_grace_s: Seconds = Field(
        86400.0, description="How long a key, template or group of ours may lie unused."
    )
    sweep_volumes: Literal["keep", "delete"] = Field(
        "keep", description="`delete`: a volume that was made for one claim goes with it; else it is told of."
    )
    node_lease_s: Seconds = Field(10.0, description="How often a virtual node's Lease is renewed.")
    node_status_s: Seconds = Field(
        300.0, description="How often an unchanged virtual node's status is written."
    )

    @model_validator(mode="before")
    @classmethod
    def _log_in(cls, given: Any) -> Any:
        """Put user and password into the URLs: a Secret's value may hold what a URL must not."""
        login = {name: given.get(f"database_{name}") for name in ("user", "password")}
        if not any(login.values()):
            return given
        urls = {
            name: _with_login(given[name], **login)
            for name in ("database_url", "direct_database_url")
            if isinstance(given.get(name), str)
        }
        return {**given, **urls}

    @field_validator("providers", mode="before")
    @classmethod
    def _parse_providers(cls, value: Any) -> Any:
        return parse_providers(value) if isinstance(value, str) else value

    @field_validator("database_url", "direct_database_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"^postgres(ql)?(\+asyncpg)?://", value):
            raise ValueError("must begin with postgresql://")
        return value

    @field_validator("webhook_url")
    @classmethod
    def _check_webhook_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("https://"):
            raise ValueError("must begin with https://")
        return value

    @field_validator("kubelet_address")
    @classmethod
    def _check_kubelet_address(cls, value: str | None) -> str | None:
        if value is None or not value.strip():
            return None
        try:
            return str(ipaddress.ip_address(value.strip().removeprefix("[").removesuffix("]")))
        except ValueError:
            raise ValueError(
                "must be an IP address: a name would have to be known to the API server"
            ) from None

    @model_validator(mode="after")
    def _check_together(self) -> "Settings":
        if not self.lease_renew_s < self.lease_deadline_s < self.lease_duration_s:
            raise ValueError("lease-renew-s < lease-deadline-s < lease-duration-s must hold")
        if self.backoff_base_s > self.backoff_max_s:
            raise ValueError("backoff-base-s must not exceed backoff-max-s")
        if self.restart_base_s > self.restart_max_s:
            raise ValueError("restart-base-s must not exceed restart-max-s")
        longest_s = max(self.unknown_timeout_floor_s, self.silence_s, self.lease_duration_s)
        if 0 < self.dead_man_s < DEAD_MAN_TIMES * longest_s:
            raise ValueError(
                f"dead-man-s must be 0, or at least {DEAD_MAN_TIMES * longest_s:g}: {DEAD_MAN_TIMES} times"
                " the longest of unknown-timeout-floor-s, silence-s and lease-duration-s"
            )
        if self.list_busy_s > self.list_rest_s:
            raise ValueError("list-busy-s must not exceed list-rest-s")
        return self


def load(flags: Mapping[str, Any], env: Mapping[str, str]) -> Settings:
    """Settings from given flags (field name -> value, None: not given) and variables.

    Raises:
        SettingsError: with every option that is wrong, unknown ``NEBULA_*`` variables included.
    """
    given: dict[str, Any] = {}
    source: dict[str, str] = {}
    errors = []
    for key, value in env.items():
        if not key.startswith(ENV_PREFIX):
            continue
        field = key.removeprefix(ENV_PREFIX).lower()
        if field in Settings.model_fields:
            if value != "":
                given[field], source[field] = value, key
        elif key not in OTHER_VARIABLES:
            near = get_close_matches(field, Settings.model_fields, n=1)
            hint = f"; did you mean {ENV_PREFIX}{near[0].upper()}?" if near else ""
            errors.append(f"{key}: no such option{hint}")
    if "providers" not in given and (earlier := env.get(EARLIER_PROVIDER, "")) not in ("", "fake"):
        given["providers"], source["providers"] = earlier, EARLIER_PROVIDER
    for field, value in flags.items():
        if value is not None:
            given[field], source[field] = value, flag_of(field)
    profile = FAST if given.get("profile") == "fast" else {}
    try:
        settings = Settings(**(profile | given))
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            field = str(item["loc"][0]) if item["loc"] else ""
            message = item["msg"].removeprefix("Value error, ")
            errors.append(f"{source.get(field, flag_of(field))}: {message}" if field else message)
        raise SettingsError(errors) from None
    if errors:
        raise SettingsError(errors)
    return settings


EARLIER_PROVIDER = "GPU_BURST_PROVIDER"
"""One provider, as installations of before name it; ``NEBULA_PROVIDERS`` says the same and more, and wins.

``fake``, and nothing, is their default: a fake cloud, which ``--dev`` brings along.
"""

# Variables with our prefix that other commands read: hack/, tests, adapters and the simulators.
OTHER_VARIABLES = frozenset(
    {
        "NEBULA_CACHE",
        "NEBULA_K8S_BIN",
        "NEBULA_HELM_BIN",
        "NEBULA_NODE_BIN",
        "NEBULA_TEST_KUBECONFIG",
        "NEBULA_DIE_AT",
        "NEBULA_TEST_POSTGRES",
    }
)


def _with_login(url: str, *, user: str | None, password: str | None) -> str:
    """``url`` with this user and password, each quoted; None leaves what stands there."""
    parts = urlsplit(url)
    login, _, place = parts.netloc.rpartition("@")
    own_user, colon, own_password = login.partition(":")
    name = own_user if user is None else quote(user, safe="")
    secret = (colon + own_password) if password is None else f":{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{name}{secret}@{place}"))


def flag_of(field: str) -> str:
    """``lease_renew_s`` -> ``--lease-renew-s``."""
    return "--" + field.replace("_", "-")
