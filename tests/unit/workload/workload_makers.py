"""Pods as the API server hands them to admission; a test names only what it is about."""

TOKEN_VOLUME = {
    "name": "kube-api-access-x7k2p",
    "projected": {
        "defaultMode": 420,
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {
                "downwardAPI": {
                    "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
                }
            },
        ],
    },
}


def a_container(**changes):
    return {
        "name": "main",
        "image": "app:1",
        "imagePullPolicy": "IfNotPresent",
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {
                "name": TOKEN_VOLUME["name"],
                "readOnly": True,
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
            }
        ],
        **changes,
    }


def a_pod(*containers, labels=None, **spec):
    """A Pod with one container and everything that the API server itself adds."""
    return {
        "metadata": {"name": "a", "namespace": "default", "labels": labels or {}},
        "spec": {
            "containers": list(containers) or [a_container()],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default",
            "serviceAccount": "default",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
            "priority": 0,
            "volumes": [TOKEN_VOLUME],
            **spec,
        },
    }
