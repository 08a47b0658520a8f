"""The workloads that seeds draw from: what their owners want, and how it is told whether they have it."""

from collections.abc import Callable

from app.api import keys
from app.kube.client import Obj


def image_of(namespace: str) -> str:
    """Tells a seed's machines apart in the cloud's books."""
    return f"work:{namespace}"


def is_ready(pod: Obj) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_over(pod: Obj) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _template(name: str, *, image: str, pool: str, env: dict[str, str], policy: str | None = None) -> Obj:
    container: Obj = {
        "name": "workload",
        "image": image,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    labels = {
        "app": name,
        keys.ENABLED_LABEL: keys.ENABLED,
        keys.NODE_POOL_LABEL: pool,
        keys.ACCELERATOR_TYPE_LABEL: "h100",
    }
    spec: Obj = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"metadata": {"labels": labels}, "spec": spec | ({"restartPolicy": policy} if policy else {})}


def _replicated(kind: str) -> Callable[..., Obj]:
    def make(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
        extra: Obj = {"serviceName": name} if kind == "StatefulSet" else {}
        return {
            "apiVersion": "apps/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {
                "replicas": count,
                "selector": {"matchLabels": {"app": name}},
                "template": _template(name, image=image, pool=pool, env={}),
                **extra,
            },
        }

    return make


def _job(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": count,
            "parallelism": count,
            "backoffLimit": 20,
            "template": _template(
                name, image=image, pool=pool, env={"FAKE_EXIT_AFTER_S": "0.5"}, policy="Never"
            ),
        },
    }


def _pod(name: str, *, image: str, pool: str, count: int, ends: bool) -> Obj:
    env = {"FAKE_EXIT_AFTER_S": "0.5"} if ends else {}
    template = _template(name, image=image, pool=pool, env=env, policy="Never")
    metadata = {"name": name, **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


KINDS: dict[str, Callable[..., Obj]] = {
    "Deployment": _replicated("Deployment"),
    "StatefulSet": _replicated("StatefulSet"),
    "Job": _job,
    "Pod": _pod,
}
