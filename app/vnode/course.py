"""What one process knows of one Pod of a virtual node beside the API objects."""

from dataclasses import dataclass, field

from app.kube.client import Obj
from app.kube.environment import Note
from app.kube.orders import Unusable
from app.provisioning.model import Outcome, Release, Released, Releasing
from app.vnode.care import Care
from app.vnode.words import Hide
from providers.base import ClaimUid


@dataclass(slots=True)
class Course:
    """What this process knows of one Pod beside the API objects. Moments are monotonic seconds."""

    seen_at: float
    claim_uid: ClaimUid | None = None
    queued: bool = False  # for renting
    outcome: Outcome | None = None
    problem: Unusable | None = None
    problems: int = 0  # in a row
    noted: frozenset[Note] = frozenset()
    hide: Hide | None = None  # masks what its cloud says; None: not known yet
    edited_to: str | None = None  # an image that came too late, and was told of
    unanswered: bool = False
    rented_at: float | None = None
    release: Release | None = None
    troubles: int = 0
    written: Obj | None = None
    written_at: float = float("-inf")
    deleted: bool = False
    claim_deleted: str | None = None  # the name of a claim that went while its Pod lived, and was told of
    care: Care = field(default_factory=Care)

    def serve(self, claim: ClaimUid) -> None:
        """Begin anew for another candidate of the Pod."""
        if self.claim_uid != claim:
            self.claim_uid, self.queued, self.outcome, self.problem = claim, False, None, None
            self.problems, self.care, self.hide = 0, Care(), None
            self.unanswered, self.rented_at, self.release, self.troubles = False, None, None, 0

    @property
    def let_go(self) -> bool:
        """Whether every machine that is known has an accepted terminate."""
        release = self.release
        return isinstance(release, Released) or (isinstance(release, Releasing) and release.accepted)


def name_of(pod: Obj) -> str:
    """For logs and people: ``namespace/name``."""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
