"""What a Pod asks of placement, read from the Pod once. Pure.

Only what the Pod's author may say is read here; nothing that is rented or destroyed later comes from the Pod
again: it is frozen on the claim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from app.api.keys import NODE_POOL_LABEL
from app.api.not_built import annotation_refusals
from app.placement.constraints import NodeConstraints, Obj, constraints_of
from app.workload import BadRequest, Unsupported, accelerator_of, build, max_price_of, options_of
from app.workload.environment import Environment
from app.workload.owners import Attribution, attribution_of, controller_of, team_of, template_of
from providers.base import Accelerator, PodUid, Workload

# What tells one revision of an owner's template from the next, where the owner itself lives on.


class InvalidRequest(ValueError):
    """The Pod asks for something that cannot be placed, whatever the cluster does; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """One machine that is wanted. The parts with defaults are what a Pod may leave open.

    ``template`` is the owner's revision that the request was made from: a provider that called the request
    itself invalid is not asked again with the same one. ``options`` are what the author asked of providers.
    ``needs_exit_code``: a Job decides by it. ``max_usd_per_hour`` is the author's own ceiling for the whole
    machine. ``namespace_labels`` are those that the cluster has for the namespace. ``workload`` is what would
    run, None if it cannot be read (provisioning says why); it serves to ask for prices only.
    """

    namespace: str
    name: str
    uid: PodUid
    accelerator: Accelerator | None
    node: NodeConstraints = field(default_factory=NodeConstraints)
    template: str = ""
    restart_policy: str = "Always"
    active_deadline_s: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    needs_exit_code: bool = False
    max_usd_per_hour: Decimal | None = None
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    workload: Workload | None = field(default=None, repr=False, compare=False)
    attribution: Attribution | None = field(default=None, compare=False)

    @property
    def team(self) -> str:
        """Whose budget it is; "" for nobody's."""
        return team_of(self.labels)

    @property
    def labels(self) -> Mapping[str, str]:
        """The Pod's labels that its claim keeps, by which budgets are chosen."""
        return self.attribution.labels if self.attribution is not None else {}

    def options_for(self, provider: str) -> dict[str, str]:
        """The options of ``<provider>-NAME`` annotations, by NAME."""
        prefix = f"{provider}-"
        return {
            name.removeprefix(prefix): value
            for name, value in sorted(self.options.items())
            if name.startswith(prefix) and name != prefix
        }


def request_of(pod: Obj, *, namespace_labels: Mapping[str, str] | None = None) -> PlacementRequest:
    """The request of a Pod as the API server has stored it.

    Raises:
        InvalidRequest: a count that is none, a count without a type, a ceiling that is no price, an option
            too long for a claim, or an annotation that this version would have to ignore.
    """
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    if refused := annotation_refusals(annotations):
        raise InvalidRequest("; ".join(refused))
    try:
        accelerator = accelerator_of(pod)
        max_usd_per_hour = max_price_of(annotations)
        options = options_of(annotations)
    except BadRequest as error:
        raise InvalidRequest(str(error)) from error
    return PlacementRequest(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=PodUid(metadata["uid"]),
        accelerator=accelerator,
        node=constraints_of(pod),
        template=template_of(pod),
        restart_policy=spec.get("restartPolicy") or "Always",
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        options=options,
        needs_exit_code=_is_jobs(pod),
        max_usd_per_hour=max_usd_per_hour,
        namespace_labels=dict(namespace_labels or {}),
        workload=_workload(pod, accelerator),
        attribution=attribution_of(pod),
    )


def pool_name(pod: Obj) -> str | None:
    """The NodePool that the Pod names, if any."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get(NODE_POOL_LABEL) or None


def _is_jobs(pod: Obj) -> bool:
    owner = controller_of(pod)
    if owner is None or owner.get("kind") != "Job":
        return False
    return str(owner.get("apiVersion") or "").partition("/")[0] == "batch"


def _workload(pod: Obj, accelerator: Accelerator | None) -> Workload | None:
    try:
        return build(pod, environment=Environment(), accelerator=accelerator, options={})
    except Unsupported:
        return None
