"""What Reserve remembers of one Pod between two looks; losing it costs no more than a few tries."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.kube.client import Obj
from app.placement.objects import uid_of
from app.provisioning.model import ClaimSpec
from app.store.blocks import Block, Scope


@dataclass(slots=True, kw_only=True)
class Lost:
    """A place that this Pod does not try again for a while, and why. ``until``: monotonic seconds.

    ``refused``: what the cloud has refused is blocked for everybody, as a rule; then that block counts alone.
    """

    claim: ClaimSpec
    kind: str
    until: float
    refused: bool

    @property
    def scope(self) -> Scope:
        claim = self.claim
        return Scope(
            provider=claim.provider,
            account=claim.account,
            accelerator=claim.accelerator.key if claim.accelerator else "",
            tier=claim.tier.value,
            region=claim.region,
        )

    def is_covered(self, blocks: Iterable[Block], *, template: str) -> bool:
        scope = self.scope
        return any(
            block.scope.covers(
                provider=scope.provider,
                account=scope.account,
                accelerator=scope.accelerator or "",
                tier=scope.tier or "",
                region=scope.region or "",
                template=template,
            )
            for block in blocks
        )


@dataclass(slots=True, kw_only=True)
class Course:
    """What this process knows of one Pod beside the objects. Moments are monotonic seconds.

    ``claim`` is the one in work, which the watch may not show yet. ``given_up`` and ``free`` hold UIDs of
    claims: those that we have deleted, and those of which nothing can be had any more.
    """

    pod_uid: str
    claim: Obj | None = None
    began: float = 0.0
    queued_since: float | None = None
    unready_since: float | None = None
    bound: bool = False
    noted: bool = False
    lifted: bool = False  # the watch may still show the gate
    tried: int = 0
    trying_since: float | None = None  # the first candidate since the Pod waited last
    given_up: set[str] = field(default_factory=set)
    free: set[str] = field(default_factory=set)
    astray: dict[str, float] = field(default_factory=dict)  # since when nobody can ask about their orders
    lost: dict[str, Lost] = field(default_factory=dict)
    said_of: str | None = None
    said_at: float = float("-inf")

    @property
    def claim_uid(self) -> str | None:
        return uid_of(self.claim) if self.claim is not None else None

    def serve(self, claim: Obj, *, now: float) -> None:
        if self.claim_uid != uid_of(claim):
            self.began, self.queued_since, self.unready_since = now, None, None
            self.bound = self.noted = False
        self.claim = claim
