"""Which shapes of a Pod are refused, by field, and which ordinary ones are not."""

import pytest
from workload_makers import TOKEN_VOLUME, a_container, a_pod

from app.workload import refusals, warnings
from app.workload.shapes import REFUSED

SECRET_REF = {"secretKeyRef": {"name": "s", "key": "k"}}
PROBE = {"httpGet": {"path": "/", "port": 80}}


def of_variable(**origin):
    return of_container(env=[{"name": "A", "valueFrom": origin}])


def of_spec(**spec):
    return a_pod(**spec)


def of_container(**changes):
    return a_pod(a_container(**changes))


def secured(**context):
    return of_container(securityContext=context)


REFUSED_PODS = {
    "spec.initContainers": of_spec(initContainers=[a_container(name="first")]),
    "spec.ephemeralContainers": of_spec(ephemeralContainers=[{"name": "debug"}]),
    "spec.hostNetwork": of_spec(hostNetwork=True),
    "spec.hostPID": of_spec(hostPID=True),
    "spec.hostIPC": of_spec(hostIPC=True),
    "spec.runtimeClassName": of_spec(runtimeClassName="kata"),
    "spec.resourceClaims": of_spec(resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}]),
    "spec.resources": of_spec(resources={"limits": {"cpu": "4"}}),
    "spec.hostAliases": of_spec(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["db"]}]),
    "spec.dnsConfig": of_spec(dnsConfig={"nameservers": ["10.0.0.1"]}),
    "spec.os.name": of_spec(os={"name": "windows"}),
    "spec.securityContext.runAsUser": of_spec(securityContext={"runAsUser": 0}),
    "spec.securityContext.runAsGroup": of_spec(securityContext={"runAsGroup": 1000}),
    "spec.securityContext.supplementalGroups": of_spec(securityContext={"supplementalGroups": [1]}),
    "spec.securityContext.sysctls": of_spec(securityContext={"sysctls": [{"name": "a", "value": "1"}]}),
    "spec.securityContext.seLinuxOptions": of_spec(securityContext={"seLinuxOptions": {"level": "s0"}}),
    "spec.securityContext.windowsOptions": of_spec(
        securityContext={"windowsOptions": {"runAsUserName": "a"}}
    ),
    "spec.securityContext.seccompProfile.type": of_spec(
        securityContext={"seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"}}
    ),
    "spec.securityContext.appArmorProfile.type": of_spec(
        securityContext={"appArmorProfile": {"type": "Localhost", "localhostProfile": "a"}}
    ),
    "spec.containers[main].imagePullPolicy": of_container(imagePullPolicy="Never"),
    "spec.containers[main].lifecycle.postStart": of_container(
        lifecycle={"postStart": {"sleep": {"seconds": 1}}}
    ),
    "spec.containers[main].lifecycle.preStop.httpGet": of_container(
        lifecycle={"preStop": {"httpGet": {"port": 80}}}
    ),
    "spec.containers[main].lifecycle.preStop.tcpSocket": of_container(
        lifecycle={"preStop": {"tcpSocket": {"port": 80}}}
    ),
    "spec.containers[main].lifecycle.stopSignal": of_container(lifecycle={"stopSignal": "SIGUSR1"}),
    "spec.containers[main].restartPolicy": of_container(restartPolicy="Never"),
    "spec.containers[main].restartPolicyRules": of_container(restartPolicyRules=[{"action": "Restart"}]),
    "spec.containers[main].ports[0].hostPort": of_container(ports=[{"containerPort": 80, "hostPort": 80}]),
    "spec.containers[main].ports[dns].protocol": of_container(
        ports=[{"name": "dns", "containerPort": 53, "protocol": "UDP"}]
    ),
    "spec.containers[main].resources.claims": of_container(resources={"claims": [{"name": "gpu"}]}),
    "spec.containers[main].volumeDevices": of_container(
        volumeDevices=[{"name": "d", "devicePath": "/dev/x"}]
    ),
    "spec.containers[main].securityContext.privileged": secured(privileged=True),
    "spec.containers[main].securityContext.capabilities.add": secured(capabilities={"add": ["SYS_ADMIN"]}),
    "spec.containers[main].securityContext.procMount": secured(procMount="Unmasked"),
    "spec.containers[main].securityContext.readOnlyRootFilesystem": secured(readOnlyRootFilesystem=True),
    "spec.containers[main].securityContext.runAsUser": secured(runAsUser=0),
    "spec.containers[main].securityContext.runAsGroup": secured(runAsGroup=0),
    "spec.containers[main].securityContext.seLinuxOptions": secured(seLinuxOptions={"level": "s0"}),
    "spec.containers[main].securityContext.windowsOptions": secured(windowsOptions={"hostProcess": True}),
    "spec.containers[main].securityContext.seccompProfile.type": secured(
        seccompProfile={"type": "Localhost"}
    ),
    "spec.containers[main].securityContext.appArmorProfile.type": secured(
        appArmorProfile={"type": "Localhost"}
    ),
}
"""A Pod for each row of the table, by the name that the message must begin with."""

OTHER_REFUSED_PODS = {
    "spec.containers[sidecar]": a_pod(a_container(), a_container(name="sidecar")),
    "spec.volumes[data].hostPath": of_spec(volumes=[{"name": "data", "hostPath": {"path": "/data"}}]),
    "spec.volumes[data].persistentVolumeClaim": of_spec(
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]
    ),
    "spec.volumes[data].csi": of_spec(volumes=[{"name": "data", "csi": {"driver": "d"}}]),
    "spec.volumes[data].ephemeral": of_spec(volumes=[{"name": "data", "ephemeral": {}}]),
    "spec.volumes[data].emptyDir": of_spec(volumes=[TOKEN_VOLUME, {"name": "data", "emptyDir": {}}]),
    "spec.volumes[data].configMap": of_spec(volumes=[{"name": "data", "configMap": {"name": "c"}}]),
    "spec.volumes[token].projected": of_spec(volumes=[TOKEN_VOLUME | {"name": "token"}]),
    "spec.volumes[kube-api-access-x].emptyDir": of_spec(
        volumes=[{"name": "kube-api-access-x", "emptyDir": {}}]
    ),
    "spec.volumes[kube-api-access-x].projected": of_spec(
        volumes=[
            {
                "name": "kube-api-access-x",
                "projected": {
                    "sources": [{"serviceAccountToken": {"path": "t"}}, {"secret": {"name": "mine"}}]
                },
            }
        ]
    ),
    "spec.containers[main].resources[amd.com/gpu]": of_container(resources={"limits": {"amd.com/gpu": "1"}}),
    "spec.containers[main].env[A].valueFrom.fieldRef": of_variable(fieldRef={"fieldPath": "status.podIP"}),
    "spec.containers[main].env[A].valueFrom.fieldRef.apiVersion": of_variable(
        fieldRef={"apiVersion": "v2", "fieldPath": "metadata.name"}
    ),
    "spec.containers[main].env[A].valueFrom.resourceFieldRef": of_variable(
        resourceFieldRef={"resource": "limits.cpu"}
    ),
    "spec.containers[main].env[A].valueFrom.fileKeyRef": of_variable(fileKeyRef={"volumeName": "v"}),
    "spec.containers[main].readinessProbe.exec.command": of_container(readinessProbe={"exec": {}}),
    "spec.containers[main].livenessProbe.grpc": of_container(livenessProbe={"grpc": {"port": 80}}),
    "spec.containers[main].startupProbe.httpGet.port": of_container(startupProbe=PROBE),
    "spec.containers[main].readinessProbe.tcpSocket.port": of_container(
        ports=[{"name": "web", "containerPort": 80}], readinessProbe={"tcpSocket": {"port": "http"}}
    ),
    "spec.containers[main].readinessProbe.httpGet.host": of_container(
        ports=[{"containerPort": 80}], readinessProbe={"httpGet": {"port": 80, "host": "10.0.0.1"}}
    ),
}


@pytest.mark.behaviour(146, 147)
@pytest.mark.parametrize("field", [*REFUSED_PODS, *OTHER_REFUSED_PODS])
def test_a_shape_that_would_run_as_something_else_is_refused_by_the_name_of_its_field(field):
    (message,) = refusals((REFUSED_PODS | OTHER_REFUSED_PODS)[field])

    assert message.startswith(f"{field} ")


def test_every_row_of_the_table_has_its_case_here():
    rows = {"spec." + ".".join(row.path).replace(".*", "[]") for row in REFUSED}

    def bare(field):
        return "".join(part.partition("]")[2] if at else part for at, part in enumerate(field.split("[")))

    assert {bare(row) for row in rows} == {bare(field) for field in REFUSED_PODS}
    assert len(REFUSED_PODS) == len(REFUSED)


def test_every_reason_is_given_at_once():
    probed = a_container(livenessProbe={"grpc": {"port": 1}})
    found = refusals(a_pod(probed, a_container(name="b"), hostNetwork=True))

    assert len(found) == 3


ORDINARY = {
    "as-the-api-server-fills-it-in": a_pod(),
    "no-token": of_spec(automountServiceAccountToken=False, volumes=[]),
    "no-token-volumes-field": of_spec(volumes=None),
    "gpu": of_container(resources={"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}),
    "statefulset": of_spec(hostname="db-0", subdomain="db"),
    "job": of_spec(restartPolicy="Never", activeDeadlineSeconds=600),
    "scheduling": of_spec(
        affinity={"nodeAffinity": {}},
        topologySpreadConstraints=[{"maxSkew": 1}],
        nodeSelector={"kubernetes.io/os": "linux"},
        priorityClassName="high",
        schedulingGates=[{"name": "other"}],
        tolerations=[{"operator": "Exists"}],
    ),
    "switched-off": of_spec(hostNetwork=False, hostPID=False, imagePullSecrets=[], os={"name": "linux"}),
    "tcp-port": of_container(ports=[{"containerPort": 80, "protocol": "TCP"}]),
    "probes": of_container(
        ports=[{"name": "web", "containerPort": 80}],
        readinessProbe=PROBE,
        livenessProbe={"tcpSocket": {"port": "web"}},
    ),
    "environment-of-objects-and-fields": of_container(
        env=[
            {"name": "TOKEN", "valueFrom": SECRET_REF},
            {"name": "NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}},
        ],
        envFrom=[{"secretRef": {"name": "s"}}],
    ),
    "private-image": of_spec(imagePullSecrets=[{"name": "registry"}]),
    "readiness-gates": of_spec(readinessGates=[{"conditionType": "x/y"}]),
    "literal-environment": of_container(env=[{"name": "A", "value": "1"}, {"name": "EMPTY"}]),
    "hardened": secured(
        allowPrivilegeEscalation=False,
        privileged=False,
        seccompProfile={"type": "RuntimeDefault"},
        capabilities={"add": ["NET_BIND_SERVICE"]},
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_pod_is_not_refused(name):
    assert refusals(ORDINARY[name]) == []
    assert warnings(ORDINARY[name]) == []


def test_a_pod_of_the_restricted_security_level_runs_and_its_author_is_told_what_is_not_enforced():
    pod = secured(
        allowPrivilegeEscalation=False,
        runAsNonRoot=True,
        capabilities={"drop": ["ALL"]},
        seccompProfile={"type": "RuntimeDefault"},
    )

    assert refusals(pod) == []
    (warning,) = warnings(pod)
    assert "spec.containers[main].securityContext.runAsNonRoot" in warning
    assert "spec.containers[main].securityContext.capabilities.drop" in warning
