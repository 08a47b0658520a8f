"""NodeClaims as provisioning knows them: the object read into a `ClaimSpec`, and the live way to its mark.

A claim is parsed in one place, here, so that no room reads what is rented or destroyed from anywhere else.
"""

from datetime import datetime
from typing import Any

from pydantic import ValidationError

from app.api.keys import DEFAULT_ACCOUNT, UNRECORDED_ANNOTATION
from app.api.nodeclaim import NodeClaim
from app.api.reasons import ClaimPhase
from app.kube import paths
from app.kube.client import Kube, Obj
from app.kube.errors import Conflict, KubeError, Replaced
from app.kube.patches import guards
from app.provisioning.model import ClaimSpec, ClaimUnreadable, LiveClaim, Mark, MarkRefused
from providers.base import Accelerator, ClaimUid, Ref, ResourceId, Tier


class UnreadableClaim(ValueError):
    """A NodeClaim that this version cannot read; nothing is rented or destroyed by it."""


def claim_spec(obj: Obj) -> ClaimSpec:
    """The claim in a NodeClaim as the API server gave it.

    Raises:
        UnreadableClaim: it does not follow our schema, or its accelerator is not ``type:count``.
    """
    uid = str(obj.get("metadata", {}).get("uid"))
    held = _read.get(uid)
    if held is not None and held[0] is obj:
        return held[1]
    spec = _claim_spec(obj)
    _read[uid] = (obj, spec)
    if len(_read) > READ_MAX:
        del _read[next(iter(_read))]
    return spec


# The same object is read a dozen times in its life, by each room that looks at it: 3.5 % of a burst's CPU.
_read: dict[str, tuple[Obj, ClaimSpec]] = {}
READ_MAX = 2048


def forget(uid: str) -> None:
    """The claim is gone: what was read of it is kept no longer."""
    _read.pop(uid, None)


def _claim_spec(obj: Obj) -> ClaimSpec:
    try:
        claim = NodeClaim.model_validate(obj)
        spec, status = claim.spec, claim.status
        region = status.region if status.region is not None else spec.region
        instance = (
            Ref(
                provider=spec.provider,
                account=status.account or spec.account or DEFAULT_ACCOUNT,
                region=region or "",
                resource_id=ResourceId(status.instance_id),
            )
            if status.instance_id
            else None
        )
        return ClaimSpec(
            uid=ClaimUid(claim.metadata.uid),
            name=claim.metadata.name,
            pod_namespace=spec.pod_ref.namespace,
            pod_name=spec.pod_ref.name,
            pod_uid=spec.pod_ref.uid,
            pool=spec.pool_ref or "",
            provider=spec.provider,
            account=spec.account,
            region=spec.region or "",
            tier=Tier(spec.capacity_type.value) if spec.capacity_type else Tier.ON_DEMAND,
            accelerator=parse_accelerator(spec.accelerator),
            max_price=spec.max_price,
            options=dict(spec.provider_options),
            instance=instance,
        )
    except ValidationError as error:  # without the values: somebody may have put a secret there
        faults = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)
        ]
        raise UnreadableClaim(f"NodeClaim {_name(obj)}: {'; '.join(faults)}") from None
    except ValueError as error:
        raise UnreadableClaim(f"NodeClaim {_name(obj)}: {error}") from error


def _name(obj: Obj) -> str:
    return str(obj.get("metadata", {}).get("name", "?"))


def parse_accelerator(text: str | None) -> Accelerator | None:
    """``H100:8`` as type and count; None for nothing.

    Raises:
        ValueError: neither.
    """
    if not text:
        return None
    kind, _, count = text.rpartition(":")
    if not kind or not count.isascii() or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"{text!r} is not TYPE:COUNT")
    return Accelerator(type=kind, count=int(count))


class ClaimDoor:
    """`app.provisioning.model.ClaimPort` over the API server. ``kube`` carries the caller's user agent."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def look(self, claim: ClaimSpec) -> LiveClaim | None:
        if not claim.name:
            return None
        try:
            obj = await self._kube.find(paths.nodeclaim(claim.name))
        except KubeError as error:
            raise ClaimUnreadable(f"NodeClaim {claim.name}: {error}") from error
        if obj is None or obj["metadata"]["uid"] != claim.uid:
            return None
        metadata = obj["metadata"]
        return LiveClaim(
            mark=_mark(obj.get("status") or {}),
            deleting="deletionTimestamp" in metadata,
            version=metadata["resourceVersion"],
            blank=not obj.get("status"),
            memory=(metadata.get("annotations") or {}).get(UNRECORDED_ANNOTATION, ""),
        )

    async def mark(self, claim: ClaimSpec, mark: Mark, *, live: LiveClaim) -> None:
        """A JSON patch with tests on UID and resourceVersion: only the claim that was looked at is marked."""
        seen: Obj = {"metadata": {"uid": claim.uid, "resourceVersion": live.version}}
        status = {
            "attempt": {
                "sequence": mark.sequence,
                "sendBy": mark.send_by.isoformat(),
                **({} if mark.account_id is None else {"accountID": mark.account_id}),
            },
            "phase": ClaimPhase.PROVISIONING.value,
        }
        if live.blank:
            ops = [*guards(seen, version=True), {"op": "add", "path": "/status", "value": status}]
        else:
            fields = [
                {"op": "add", "path": f"/status/{key}", "value": value} for key, value in status.items()
            ]
            ops = [*guards(seen, version=True), *fields]
        try:
            await self._kube.patch(paths.nodeclaim_status(claim.name), ops, kind="json", metadata_only=True)
        except (Replaced, Conflict) as error:
            raise MarkRefused(f"NodeClaim {claim.name}: {error}") from error
        except KubeError as error:
            raise ClaimUnreadable(f"NodeClaim {claim.name}: {error}") from error

    async def remember(self, claim: ClaimSpec, memory: str, *, live: LiveClaim) -> None:
        """In an annotation, since what a CRD of an earlier version does not know would be dropped unsaid."""
        annotations = {UNRECORDED_ANNOTATION: memory}
        body = {"metadata": {"resourceVersion": live.version, "annotations": annotations}}
        try:
            await self._kube.patch(paths.nodeclaim(claim.name), body, kind="merge", metadata_only=True)
        except (Replaced, Conflict) as error:
            raise MarkRefused(f"NodeClaim {claim.name}: {error}") from error
        except KubeError as error:
            raise ClaimUnreadable(f"NodeClaim {claim.name}: {error}") from error

    async def find(self, uid: ClaimUid) -> bool:
        try:
            async for page in self._kube.list_pages(paths.nodeclaims()):
                if any(item["metadata"]["uid"] == uid for item in page["items"]):
                    return True
        except KubeError as error:
            raise ClaimUnreadable(f"NodeClaims: {error}") from error
        return False


def _mark(status: dict[str, Any]) -> Mark | None:
    attempt = status.get("attempt")
    if not attempt:
        return None
    return Mark(
        sequence=attempt["sequence"],
        send_by=datetime.fromisoformat(attempt["sendBy"]),
        account_id=attempt.get("accountID"),
    )
