"""What the simulated RunPod checks of a request, and the switches of its behaviour. No engine, no state.

The schema of a create is closed: an unknown key is 422. Then come the rules, each with the text that the live
API was seen to give. The order of the checks is a guess of ours.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from providers.simulation.http import Answer
from providers.simulation.scenario import ScenarioError

BODY_BYTES_MAX = 102_400
NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications."
    " Please refresh and try again."
)
LOW_BALANCE = "Your account balance is too low to rent a pod. Please add funds to your account."
NO_DISK = "You must either provide a template id or pod configuration parameters"

_CREATE_KEYS = {
    *(
        "name",
        "image",
        "gpu",
        "cpu",
        "cloud",
        "disk",
        "env",
        "ports",
        "args",
        "entrypoint",
        "cmd",
        "registry",
    ),
    *("dataCenterIds", "mounts", "globalNetworking", "startSsh", "startJupyter", "templateId"),
}
_GPU_KEYS = {
    *("id", "count", "minCudaVersion", "allowedCudaVersions"),
    *("minVcpuCountPerGpu", "minRamPerGpu"),
}
_ENV_MAX = 50


class Quirks(BaseModel):
    """Switches of the scenario's ``quirks``; each is off unless it says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lifecycle: Literal["documented", "observed"] = Field(
        "documented",
        description="observed: RUNNING right after the create, without a runtime until it has a container.",
    )
    ports_after_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Running until a port is mapped to an address outside."
    )
    balance_usd: Decimal | None = Field(
        None, description="Credit at the start: a create needs an hour of its price, at zero all pods go."
    )
    per_minute: int | None = Field(None, ge=1, description="Calls a minute; 429 above, told in headers.")
    read_only_key: bool = Field(False, description="The key may read and nothing else.")
    suspended: bool = Field(False, description="The account is suspended.")
    closed_pools: tuple[str, ...] = Field((), description="Cards that this key has no access to.")
    stock: dict[str, Literal["NONE", "LOW", "MEDIUM", "HIGH"]] = Field(
        default_factory=dict, description="What the catalogue says of a card, whatever is true."
    )
    elsewhere: str | None = Field(
        None, description="Every pod is placed in this data centre: the ones asked for are only preferred."
    )
    registry_delay_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="A new registry login works only after so long."
    )
    start_fails: bool = Field(False, description="A stopped pod cannot start: its host's cards are taken.")
    exited_cost: bool = Field(False, description="A stopped pod still shows its cost.")
    graphql_retired: bool = Field(False, description="The older API answers 404.")
    sshd: bool = Field(
        False,
        description="The images carry an sshd that takes PUBLIC_KEY, at port 22; needs processes.",
    )
    ssh_told: bool = Field(True, description="A pod shows ssh.direct, beside the row of the mapped port.")
    bill_lag_s: Annotated[float, Field(ge=0)] = Field(
        3600.0, description="An hour is on the bill so long after its end."
    )
    forgets_logs_s: Annotated[float, Field(ge=0)] = Field(
        120.0, description="A container's lines are lost so long after it is removed."
    )


def quirks_of(values: Mapping[str, Any]) -> Quirks:
    """Raises:
    ScenarioError: a switch is unknown or wrong.
    """
    try:
        return Quirks.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False, include_input=False):
            field = ".".join(("quirks", *map(str, item["loc"])))
            lines.append(f"{field}: {item['msg'].removeprefix('Value error, ')}")
        raise ScenarioError("\n".join(lines)) from None


class Wrong(Exception):
    """A request that is answered with a problem."""

    def __init__(self, status: int, detail: str, errors: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.answer = problem(status, detail, errors)


_TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    409: "Conflict",
    410: "Gone",
    413: "Payload Too Large",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
}


def problem(
    status: int, detail: str, errors: tuple[str, ...] = (), headers: Mapping[str, str] | None = None
) -> Answer:
    """The form of every error of REST v2. ``status`` 200 is an error that comes as a success."""
    body: dict[str, Any] = {"title": _TITLES.get(status, "Error"), "status": status, "detail": detail}
    if errors:
        body["errors"] = list(errors)
    return Answer(status=status, body=body, headers=headers or {}, media_type="application/problem+json")


def check_create(body: Any) -> dict[str, Any]:
    """The body of a create, as far as it can be judged without the cloud.

    Raises:
        Wrong: it is refused.
    """
    if not isinstance(body, dict):
        raise _invalid("$: must be an object")
    errors = [f"$: additional properties '{key}' not allowed" for key in sorted(set(body) - _CREATE_KEYS)]
    errors += _wrong_types(body)
    gpu = body.get("gpu")
    if isinstance(gpu, dict):
        errors += [
            f"$.gpu: additional properties '{key}' not allowed" for key in sorted(set(gpu) - _GPU_KEYS)
        ]
        if not isinstance(gpu.get("id"), str) or not gpu["id"]:
            errors.append("$.gpu.id: is required")
        if "count" in gpu and (not isinstance(gpu["count"], int) or gpu["count"] < 1):
            errors.append("$.gpu.count: must be at least 1")
    if errors:
        raise _invalid(*errors)
    if (gpu is None) == (body.get("cpu") is None):
        raise Wrong(400, "exactly one of gpu and cpu must be given")
    if isinstance(gpu, dict) and gpu.get("minCudaVersion") and gpu.get("allowedCudaVersions"):
        raise Wrong(400, "minCudaVersion and allowedCudaVersions exclude each other")
    if body.get("templateId"):
        raise Wrong(404, "template not found")
    return body


def _wrong_types(body: dict[str, Any]) -> list[str]:
    errors = []
    if not isinstance(body.get("name"), str) or not body["name"]:
        errors.append("$.name: must be at least 1 character")
    if not isinstance(body.get("image"), str) or not body["image"]:
        errors.append("$.image: is required")
    env = body.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        errors.append("$.env: must be an object of strings")
    elif len(env) > _ENV_MAX:
        errors.append(f"$.env: must have at most {_ENV_MAX} properties")
    if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
        errors.append("$.cloud: must be one of SECURE, COMMUNITY")
    if "disk" in body and (not isinstance(body["disk"], int) or body["disk"] < 1):
        errors.append("$.disk: must be at least 1")
    for key in ("ports", "dataCenterIds", "entrypoint", "cmd"):
        value = body.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            errors.append(f"$.{key}: must be an array of strings")
    for port in body.get("ports", []) if isinstance(body.get("ports", []), list) else ():
        number, _, kind = str(port).partition("/")
        if not number.isdecimal() or kind not in ("http", "tcp"):
            errors.append(f"$.ports: {port!r} is not port/http or port/tcp")
    return errors


def _invalid(*errors: str) -> Wrong:
    return Wrong(422, "Request validation failed.", errors)
