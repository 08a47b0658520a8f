"""What the chart renders, without a cluster: for both Helms, for every way to install."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api.keys import MUTATING_WEBHOOK_CONFIGURATION, VALIDATING_WEBHOOK_CONFIGURATION
from app.kube.preflight import rights
from app.settings import load
from hack.chart import MANIFEST, written
from tests.chart.conftest import CHART, KUBERNETES, NAMESPACE, Helm, Obj

pytestmark = pytest.mark.slow

EXTERNAL: Obj = {
    "database.mode": "external",
    "database.external.host": "db.example",
    "database.existingSecret": "db",
}
ALL: Obj = {
    "providers.fake.enabled": True,
    "providers.fake.scenario": {"cloud": "fake", "regions": ["eu-1"]},
    "metrics.serviceMonitor.enabled": True,
    "metrics.prometheusRule.enabled": True,
    "metrics.dashboards.enabled": True,
    "database.reportRole.enabled": True,
    "networkPolicy.enabled": True,
    "networkPolicy.apiServerCIDRs": ["10.0.0.0/8"],
    "global.imageRegistry": "registry.example",
    "global.imagePullSecrets": [{"name": "pull"}],
    "commonLabels": {"team": "platform"},
    "commonAnnotations": {"example.org/owner": "platform"},
    "controller.options": {"listRestS": 30, "profile": "fast"},
    "service.ipFamilyPolicy": "PreferDualStack",
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}}],
}
HOST: Obj = {"controller.hostNetwork": True, "kubelet.port": 10450}
KEYS = ("--user-key=username", "--password-key=password")
OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
WAYS = {
    "zero": ({}, ()),
    "external": (EXTERNAL, ()),
    "all": (ALL, OPERATOR),
    "one-replica": ({"controller.replicas": 1, "database.bundled.persistence.enabled": False}, ()),
    "openshift": ({"global.openshift": "force"}, ()),
    "own-secret": ({"database.existingSecret": "kept"}, ()),
}
ways = pytest.mark.parametrize(("values", "more"), WAYS.values(), ids=list(WAYS))


def kinds(objects: list[Obj]) -> list[str]:
    return [each["kind"] for each in objects]


def named(objects: list[Obj], kind: str, name: str) -> Obj:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates(objects: list[Obj]) -> Iterator[tuple[str, Obj]]:
    """Every Pod's spec, by the name of the object that makes it."""
    for each in objects:
        spec = each.get("spec") or {}
        match each["kind"]:
            case "Pod":
                yield each["metadata"]["name"], spec
            case "Deployment" | "StatefulSet" | "Job":
                yield each["metadata"]["name"], spec["template"]["spec"]
            case "CronJob":
                yield each["metadata"]["name"], spec["jobTemplate"]["spec"]["template"]["spec"]


def test_both_helms_find_nothing_to_complain_of(each_helm: Helm) -> None:
    done = each_helm.run("lint", "--strict", str(CHART))

    assert done.returncode == 0, done.stdout + done.stderr


@ways
def test_both_helms_render_the_same_and_twice_the_very_same(
    each_helm: Helm, helm: Helm, values: Obj, more: tuple[str, ...]
) -> None:
    first, second = each_helm.text(values, more=more), each_helm.text(values, more=more)

    assert first == second
    assert list(yaml.safe_load_all(first)) == helm_objects(helm, values, more)


def helm_objects(helm: Helm, values: Obj, more: tuple[str, ...]) -> list[Any]:
    return list(yaml.safe_load_all(helm.text(values, more=more)))


@ways
def test_every_pod_is_restricted_has_resources_and_no_floating_image(
    helm: Helm, values: Obj, more: tuple[str, ...]
) -> None:
    seen = 0
    for name, spec in pod_templates(helm.objects(values, more=more)):
        seen += 1
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert ("runAsUser" in pod) is ("global.openshift" not in values), name
        assert spec["serviceAccountName"] != "default", name
        assert ("imagePullSecrets" in spec) is ("global.imagePullSecrets" in values), name
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"memory"}
            assert re.fullmatch(r"[^:@]+:[^:@]+", container["image"]), container["image"]
            assert not container["image"].endswith(":latest")
            assert container["image"].startswith("registry.example/") is ("global.imageRegistry" in values)
    assert seen >= 3


def test_a_digest_pins_the_image_and_the_tag_stays_for_people(helm: Helm) -> None:
    digest = "sha256:" + "a" * 64

    objects = helm.objects({"image.digest": digest, "image.tag": "1.2.3"})

    spec = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == f"nebula/nebula:1.2.3@{digest}"


def test_zero_values_bring_a_database_and_no_provider(helm: Helm) -> None:
    objects = helm.objects()

    controller = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in controller["env"]}
    assert variables["NEBULA_PROVIDERS"] == ""
    assert variables["NEBULA_DATABASE_URL"] == (
        "postgresql://nebula-postgres.nebula-system.svc:5432/nebula?sslmode=disable"
    )
    assert "StatefulSet" in kinds(objects)
    assert not {"ServiceMonitor", "NetworkPolicy"} & set(kinds(objects))


def test_orphans_14_an_upgrade_asks_first_whether_a_provider_that_goes_is_still_in_use(helm: Helm) -> None:
    job = named(helm.objects(), "Job", "nebula-upgrade")
    (container,) = job["spec"]["template"]["spec"]["containers"]

    # Helm runs the hooks of the revision that it goes back to, with exactly its providers.
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade,pre-rollback"
    assert job["spec"]["backoffLimit"] == 0
    assert container["args"] == ["orphans", "check-providers", "--unless-away"]
    assert {"NEBULA_PROVIDERS", "NEBULA_DATABASE_URL"} <= {each["name"] for each in container["env"]}
    left = helm.objects({"installation.checkProviders": False})
    assert "nebula-upgrade" not in {each["metadata"]["name"] for each in left}


def test_guards_say_their_word_also_where_the_databases_secret_was_never_made(helm: Helm) -> None:
    """An install with a wrong image never made it; the upgrade that mends it must not wait for it."""
    objects = helm.objects()
    for name in ("nebula-upgrade", "nebula-uninstall"):
        (container,) = named(objects, "Job", name)["spec"]["template"]["spec"]["containers"]
        refs = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
        assert [ref.get("optional") for ref in refs] == [True, True], name
        # Without a user the driver asks for the name of the container's, which has none.
        assert {"name": "PGUSER", "value": "nebula"} in container["env"]

    (controller,) = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]["containers"]
    refs = [each["valueFrom"].get("secretKeyRef") for each in controller["env"] if "valueFrom" in each]
    assert not [ref for ref in refs if ref is not None and "optional" in ref]


def test_whoever_gets_the_database_url_gets_the_ca_that_it_names(helm: Helm) -> None:
    seen = set()
    for name, spec in pod_templates(helm.objects({**EXTERNAL, "database.external.caSecret": "db-ca"})):
        for container in spec["containers"]:
            url = next(
                (e["value"] for e in container.get("env", ()) if e["name"] == "NEBULA_DATABASE_URL"), ""
            )
            if "sslrootcert=/etc/nebula/database-ca/ca.crt" not in url:
                continue
            seen.add(name)
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            volumes = {each["name"]: each for each in spec["volumes"]}
            assert volumes[mounts["/etc/nebula/database-ca"]]["secret"]["secretName"] == "db-ca", name
    assert seen == {"nebula", "nebula-test", "nebula-upgrade", "nebula-uninstall"}


@pytest.mark.parametrize("way", ["--set-json", "-f"])
def test_numbers_are_rendered_as_people_write_them(each_helm: Helm, tmp_path: Path, way: str) -> None:
    options = {"outputTotalBytes": 67108864, "listRestS": 30, "restartResetS": 0.5, "catalogDir": "/a b"}
    more: tuple[str, ...] = ("--set-json", f"controller.options={json.dumps(options)}")
    if way == "-f":
        values = {
            "controller": {"options": options},
            "database": {"bundled": {"settings": {"work_mem": 67108864, "jit": False}}},
        }
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        more = ("-f", str(tmp_path / "values.yaml"))
    objects = each_helm.objects(more=more)

    (controller,) = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in controller["env"]}
    assert given["NEBULA_OUTPUT_TOTAL_BYTES"] == "67108864"
    assert given["NEBULA_LIST_REST_S"] == "30"
    assert given["NEBULA_RESTART_RESET_S"] == "0.5"
    assert given["NEBULA_CATALOG_DIR"] == "/a b"
    if way == "-f":
        (postgres,) = named(objects, "StatefulSet", "nebula-postgres")["spec"]["template"]["spec"][
            "containers"
        ]
        assert {"work_mem=67108864", "jit=false"} <= set(postgres["args"])


def test_every_volume_claim_has_a_pod_from_the_beginning(helm: Helm) -> None:
    """Where a volume is made for its first Pod, `helm install --wait` waits until every claim has had one."""
    objects = helm.objects({"providers.fake.enabled": True})
    claims = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
    at_once = [each for each in objects if each["kind"] != "CronJob"]
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, spec in pod_templates(at_once)
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }

    assert used == claims == {"nebula-postgres-backup", "nebula-fake-cloud"}


def test_the_backup_volumes_job_has_another_name_only_where_it_is_another(helm: Helm) -> None:
    """Renderers apply it again and again, Helm 4 waits for it: it may not change, vanish or fail."""

    def job(values: Obj) -> Obj:
        (found,) = [each for each in helm.objects(values) if "-backup-volume-" in each["metadata"]["name"]]
        return found

    zero = job({})
    assert job({"controller.replicas": 3, "commonAnnotations": {"a": "b"}})["spec"] == zero["spec"]
    assert job({"controller.replicas": 3})["metadata"]["name"] == zero["metadata"]["name"]
    for values in ({"commonLabels": {"team": "x"}}, {"database.bundled.nodeSelector": {"a": "b"}}):
        assert job(values)["metadata"]["name"] != zero["metadata"]["name"]
    assert not {"ttlSecondsAfterFinished", "activeDeadlineSeconds"} & set(zero["spec"])
    (container,) = zero["spec"]["template"]["spec"]["containers"]
    here = [part.replace("/backup", "/nowhere") for part in container["command"]]
    done = subprocess.run(here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "nebula: backups cannot be written\n")


def test_a_long_name_of_a_release_is_cut_so_that_each_kind_takes_it(helm: Helm) -> None:
    objects = helm.objects({"fullnameOverride": "n" * 30 + "-" + "n" * 30})
    longest = {"StatefulSet": 52, "CronJob": 52, "Job": 63, "Deployment": 63, "Service": 63}

    for each in objects:
        name = each["metadata"]["name"]
        assert len(name) <= longest.get(each["kind"], 253), name
        assert "--" not in name


def test_the_databases_pods_run_where_its_values_say(helm: Helm) -> None:
    place = {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "db", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    }
    objects = helm.objects({f"database.bundled.{key}": value for key, value in place.items()})
    placed = {name for name, spec in pod_templates(objects) if place == {key: spec.get(key) for key in place}}

    assert {re.sub("-[0-9a-f]{8}$", "", name) for name in placed} == {
        "nebula-postgres",
        "nebula-postgres-backup",
        "nebula-postgres-backup-volume",
    }
    for _, spec in pod_templates(helm.objects()):
        assert not {"nodeSelector", "affinity", "tolerations"} & set(spec)


def test_a_secret_that_is_made_has_the_keys_by_which_it_is_read(helm: Helm) -> None:
    objects = helm.objects({"database.secretKeys": {"username": "user", "password": "pw"}})

    controller = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]
    (maker,) = controller["initContainers"]
    assert {"--user-key=user", "--password-key=pw"} <= set(maker["args"])
    read = [
        each["valueFrom"]["secretKeyRef"]["key"]
        for _, spec in pod_templates(objects)
        for container in spec["containers"]
        for each in container.get("env", ())
        if "secretKeyRef" in each.get("valueFrom", {})
    ]
    assert set(read) == {"user", "pw"}


def test_nothing_secret_is_ever_rendered(helm: Helm) -> None:
    for values, more in WAYS.values():
        assert "Secret" not in kinds(helm.objects(values, more=more))


def test_webhook_configurations_are_the_controllers_own(helm: Helm) -> None:
    for values, more in WAYS.values():
        assert not [kind for kind in kinds(helm.objects(values, more=more)) if "Webhook" in kind]


@pytest.mark.field_case("FC-119")
def test_the_crds_are_those_of_the_code_and_stay_when_the_release_goes(helm: Helm) -> None:
    rendered = {each["metadata"]["name"]: each for each in helm.objects() if "Definition" in each["kind"]}
    ours = [yaml.safe_load(path.read_text()) for path in (CHART.parent / "crds").glob("*.yaml")]

    assert len(ours) == 3
    for crd in ours:
        found = rendered[crd["metadata"]["name"]]
        assert found["spec"] == crd["spec"]
        assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not [each for each in helm.objects({"crds.install": False}) if "Definition" in each["kind"]]


def test_the_charts_copy_of_the_crds_is_not_stale() -> None:
    for path in (CHART.parent / "crds").glob("*.yaml"):
        assert (CHART / "files" / "crds" / path.name).read_text() == path.read_text()


def test_the_rights_are_exactly_those_that_the_controller_says_it_needs(helm: Helm) -> None:
    objects = helm.objects()
    roles: list[tuple[str, str, str | None]] = [
        ("ClusterRole", "nebula-controller", None),
        ("Role", "nebula", NAMESPACE),
        ("Role", "nebula-node-leases", "kube-node-lease"),
    ]
    granted = {
        (group, resource, verb, namespace, name)
        for kind, role, namespace in roles
        for rule in named(objects, kind, role)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }

    needed = {
        (right.group, right.resource, verb, right.namespace, right.name)
        for right in rights(NAMESPACE)
        for verb in right.verbs
    }
    assert granted == needed


def test_on_the_hosts_network_the_kubelet_endpoint_has_a_port_of_its_own(helm: Helm) -> None:
    objects = helm.objects(HOST)

    deployment = named(objects, "Deployment", "nebula")["spec"]
    spec = deployment["template"]["spec"]
    # Its ports are the node's: on as many nodes as replicas, one more has nowhere to go.
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert 10450 in {port["containerPort"] for port in spec["containers"][0]["ports"]}


def test_the_guards_word_is_shown_and_a_list_of_what_goes_on_to_cost_stays(helm: Helm) -> None:
    """With abandon the printed table is all that is left: the Job that printed it must not go."""
    for policy, stays in (("refuse", False), ("drain", False), ("abandon", True)):
        notes = named(helm.objects({"installation.uninstallPolicy": policy}), "Job", "nebula-uninstall")[
            "metadata"
        ]["annotations"]
        assert ("hook-succeeded" not in notes["helm.sh/hook-delete-policy"]) is stays, policy
        assert notes["helm.sh/hook-output-log-policy"] == "hook-succeeded,hook-failed"


def test_what_is_deleted_at_the_end_is_deleted_by_name(helm: Helm) -> None:
    hooks = [
        rule
        for rule in named(helm.objects(), "ClusterRole", "nebula-uninstall")["rules"]
        if "admissionregistration.k8s.io" in rule["apiGroups"]
    ]

    assert [(set(rule["resourceNames"]), rule["verbs"]) for rule in hooks] == [
        ({MUTATING_WEBHOOK_CONFIGURATION, VALIDATING_WEBHOOK_CONFIGURATION}, ["delete"])
    ]


def test_readme_and_plain_manifest_are_those_of_the_chart() -> None:
    for path, text in written().items():
        assert path.read_text() == text, f"{path.name}: python -m hack.chart"


def test_the_plain_manifest_is_whole_and_needs_no_helm() -> None:
    objects = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each]

    assert {"Namespace", "Deployment", "StatefulSet", "CronJob", "ClusterRole", "Service"} <= set(
        kinds(objects)
    )
    assert not {"Job", "Pod", "Secret"} & set(kinds(objects))
    assert "helm.sh/" not in MANIFEST.read_text()


def test_defaults_of_sweeper_and_cost_are_those_of_the_controller(helm: Helm) -> None:
    controller = named(helm.objects(), "Deployment", "nebula")["spec"]["template"]["spec"]["containers"][0]
    given = {each["name"]: each["value"] for each in controller["env"] if "value" in each}
    taken = load(
        {}, {name: value for name, value in given.items() if not name.startswith("NEBULA_KUBELET_A")}
    )
    ours = load({}, {})

    for name in given:
        field = name.removeprefix("NEBULA_").lower()
        if field.startswith(("sweep_", "bill_", "close_", "budget_", "log_", "database_pool")):
            assert getattr(taken, field) == getattr(ours, field), name


def test_the_report_role_gets_a_password_of_its_own_that_is_made_in_the_cluster(helm: Helm) -> None:
    objects = helm.objects({"database.reportRole.enabled": True})

    controller = named(objects, "Deployment", "nebula")["spec"]["template"]["spec"]
    assert [each["args"] for each in controller["initContainers"]] == [
        ["setup", "database-secret", "--name=nebula-postgres", "--user=nebula", *KEYS],
        ["setup", "database-secret", "--name=nebula-postgres-report", "--user=nebula-reporter", *KEYS],
    ]
    assert {"name": "NEBULA_REPORT_ROLE", "value": "nebula-reporter"} in controller["containers"][0]["env"]
    postgres = named(objects, "StatefulSet", "nebula-postgres")["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each for each in postgres["env"]}
    assert variables["REPORT_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "nebula-postgres-report"
    assert "Secret" not in kinds(objects)


def test_alerts_and_dashboards_are_rendered_only_if_asked_for(helm: Helm) -> None:
    assert "PrometheusRule" not in kinds(helm.objects())
    objects = helm.objects(
        {
            "metrics.prometheusRule.enabled": True,
            "metrics.prometheusRule.labels": {"release": "prometheus"},
            "metrics.dashboards.enabled": True,
            "metrics.dashboards.namespace": "grafana",
        },
        more=OPERATOR,
    )

    rule = named(objects, "PrometheusRule", "nebula")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert [group["name"] for group in rule["spec"]["groups"]] == [
        "nebula-money",
        "nebula-operation",
        "nebula-orphans",
    ]
    for title in ("money", "operation"):
        board = named(objects, "ConfigMap", f"nebula-dashboard-{title}")
        assert board["metadata"]["namespace"] == "grafana"
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        file = CHART / "files" / "dashboards" / f"{title}.json"
        assert json.loads(board["data"][f"nebula-{title}.json"]) == json.loads(file.read_text())


def test_a_cluster_that_is_too_old_is_refused(each_helm: Helm) -> None:
    argv = ("template", "nebula", str(CHART), "--kube-version", "v1.29.9")

    assert "incompatible with Kubernetes v1.29.9" in each_helm.run(*argv).stderr


def test_the_images_are_listed_for_mirrors(helm: Helm) -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    listed = {each["image"] for each in yaml.safe_load(about["annotations"]["artifacthub.io/images"])}
    used = {
        container["image"]
        for _, spec in pod_templates(helm.objects({"providers.fake.enabled": True}))
        for container in [*spec.get("initContainers", ()), *spec["containers"]]
    }

    assert used == listed


def test_a_disruption_budget_only_where_it_does_not_block_a_drain(helm: Helm) -> None:
    assert "PodDisruptionBudget" in kinds(helm.objects())
    assert "PodDisruptionBudget" not in kinds(helm.objects({"controller.replicas": 1}))


@pytest.mark.parametrize("part", ["serviceMonitor", "prometheusRule"])
def test_an_object_of_the_operator_without_it_is_a_clear_failure(helm: Helm, part: str) -> None:
    done = helm.template({f"metrics.{part}.enabled": True})

    assert done.returncode != 0
    assert f"metrics.{part}.enabled is true, but this cluster has no monitoring.coreos.com/v1" in done.stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"controler": {}}, "controler"),
        ({"controller.replica": 1}, "replica"),
        ({"controller.replicas": 0}, "replicas"),
        ({"controller.hostNetwork": True}, "set kubelet.port to a port that is free on the nodes"),
        (HOST | {"webhook.port": 10250}, "set webhook.port to a port that is free on the nodes"),
        (HOST | {"networkPolicy.enabled": True}, "controller.hostNetwork and networkPolicy.enabled"),
        ({"database.mode": "external"}, "host"),
        ({"database.mode": "sqlite"}, "mode"),
        ({"image.tag": "latest"}, "tag"),
        ({"image.digest": "sha256:abc"}, "digest"),
        ({"database.bundled.persistence.size": "much"}, "size"),
        ({"database.bundled.majorVersion": 14}, "majorVersion"),
        ({"controller.options": {"databaseUrl": "postgresql://x"}}, "options"),
        ({"controller.options": {"dev": True}}, "options"),
        ({"providers.extra": ["Not An Entry"]}, "extra"),
        ({"installation.uninstallPolicy": "force"}, "uninstallPolicy"),
        ({"controller.options": {"sweepMode": "report"}}, "set sweeper.mode instead"),
        ({"sweeper.mode": "off"}, "mode"),
        ({"database.secretKeys": {"username": "", "password": "pw"}}, "username"),
        ({"sweeper.maxShare": 10}, "maxShare"),
        ({"database.reportRole.name": "Reports Role"}, "name"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name(each_helm: Helm, values: Obj, says: str) -> None:
    done = each_helm.template(values)

    assert done.returncode != 0
    assert says in done.stderr, done.stderr


def test_an_umbrella_chart_may_pass_what_is_its_own(each_helm: Helm, tmp_path: Path) -> None:
    umbrella = tmp_path / "umbrella"
    (umbrella / "charts").mkdir(parents=True)
    (umbrella / "charts" / "nebula").symlink_to(CHART)
    (umbrella / "Chart.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v2",
                "name": "umbrella",
                "version": "1.0.0",
                "dependencies": [{"name": "nebula", "version": "0.1.0", "condition": "nebula.enabled"}],
            }
        )
    )
    (umbrella / "values.yaml").write_text(
        yaml.safe_dump({"global": {"theirs": {"x": 1}}, "nebula": {"enabled": True}})
    )

    done = each_helm.run("template", "all", str(umbrella), *KUBERNETES)

    assert done.returncode == 0, done.stderr
    assert "name: all-nebula" in done.stdout
