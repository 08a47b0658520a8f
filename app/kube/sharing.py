"""Equal parts of many objects, kept once: the Pods of one Deployment say the same in most of their spec.

An object costs ten times its JSON as Python's dicts, and most of that is what its siblings say, too. Cached
objects are never changed, so they may share it. What is remembered is bounded; forgetting costs memory alone.
"""

from typing import Any, Final

import orjson

from app.kube.client import Obj

MOST: Final = 1024  # parts remembered; a burst of Pods has some dozens, and conditions a few a second
_OF_METADATA: Final = ("labels", "ownerReferences", "finalizers")
# Never equal as a whole: each Pod's token is a volume of a name of its own, mounted by that name.
_BY_FIELD: Final = ("containers", "initContainers", "volumes")


class Shares:
    """The parts that have been seen. For one thread."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._seen: dict[bytes, Any] = {}

    def share(self, obj: Obj) -> None:
        """Put parts seen before in place of equal ones in ``obj``, which nobody else may hold yet.

        The parts are the fields of its spec (of its containers and volumes, each one's fields), some of its
        metadata, and each condition of its status.
        """
        metadata = obj["metadata"]
        for name in _OF_METADATA:
            if name in metadata:
                metadata[name] = self._one(metadata[name])
        spec = obj.get("spec")
        if spec:
            for name in _BY_FIELD:
                for each in spec.get(name) or ():
                    if isinstance(each, dict):
                        self._fields(each)
            self._fields(spec, but=_BY_FIELD)
        conditions = (obj.get("status") or {}).get("conditions")
        if conditions:
            conditions[:] = map(self._one, conditions)

    def _fields(self, whole: Obj, *, but: tuple[str, ...] = ()) -> None:
        for name, value in whole.items():
            if value and isinstance(value, (dict, list)) and name not in but:
                whole[name] = self._one(value)

    def _one(self, part: Any) -> Any:
        key = orjson.dumps(part)
        held = self._seen.get(key)
        if held is None:
            if len(self._seen) >= self._most:
                self._seen.clear()
            held = self._seen[key] = part
        return held
