"""The environment of a container, composed as a kubelet composes it."""

import base64

import pytest
from workload_makers import a_container, a_pod

from app.workload import refusals
from app.workload.environment import Environment, Kind, Source, Unresolved, compose, sources

CANARY = "canary-5f2d"


def a_secret(**data):
    return {"data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}}


def a_config_map(**data):
    return {"data": data}


def composed(
    *, env=(), env_from=(), secrets=None, config_maps=None, metadata=None, spec=None, resources=None
):
    """What `compose` makes of a Pod where the given objects exist, and no other."""
    container = a_container(env=list(env), envFrom=list(env_from), resources=resources or {})
    pod = a_pod(container, **(spec or {}))
    pod["metadata"] |= {"namespace": "prod", "uid": "u-1", **(metadata or {})}
    held = {Source(Kind.SECRET, name): each for name, each in (secrets or {}).items()}
    held |= {Source(Kind.CONFIG_MAP, name): each for name, each in (config_maps or {}).items()}
    objects = {source: held.get(source) for source in sources(container)}
    return compose(pod, container, objects, node="nebula-fake")


def of_secret(name, *, key=None, optional=None, prefix=None):
    """An ``envFrom`` entry, or with a key a ``valueFrom``."""
    reference = {"name": name} | ({} if optional is None else {"optional": optional})
    if key is not None:
        return {"secretKeyRef": reference | {"key": key}}
    return {"secretRef": reference} | ({} if prefix is None else {"prefix": prefix})


def of_map(name, *, key=None, optional=None, prefix=None):
    entry = of_secret(name, key=key, optional=optional, prefix=prefix)
    return {kind.replace("secret", "configMap"): value for kind, value in entry.items()}


def variable(name, **origin):
    return {"name": name, "valueFrom": origin}


@pytest.mark.behaviour(224)
def test_without_env_and_env_from_there_is_nothing():
    assert composed() == Environment()


@pytest.mark.behaviour(225, 234)
def test_env_from_is_taken_in_order_with_its_prefix_and_binary_data_is_left_out():
    made = composed(
        env_from=[of_map("a"), of_map("b"), of_secret("c", prefix="C_")],
        config_maps={
            "a": a_config_map(X="a", Y="a") | {"binaryData": {"Z": "AAAA"}},
            "b": a_config_map(Y="b"),
        },
        secrets={"c": a_secret(X="c")},
    )

    assert made.variables == {"X": "a", "Y": "b", "C_X": "c"}


@pytest.mark.behaviour(226)
def test_env_is_laid_over_env_from_and_the_last_of_a_name_wins():
    made = composed(
        env=[{"name": "X", "value": "first"}, {"name": "X", "value": "last"}],
        env_from=[of_map("a")],
        config_maps={"a": a_config_map(X="a", Y="a")},
    )

    assert made.variables == {"X": "last", "Y": "a"}


@pytest.mark.behaviour(227, 229)
def test_optional_absence_leaves_the_variable_out():
    made = composed(
        env=[
            variable("A", **of_secret("gone", key="k", optional=True)),
            variable("B", **of_map("there", key="gone", optional=True)),
            {"name": "C", "value": "kept"},
        ],
        env_from=[of_secret("gone", optional=True), of_map("gone", optional=True)],
        config_maps={"there": a_config_map(k="v")},
    )

    assert made.variables == {"C": "kept"}


@pytest.mark.behaviour(228)
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (of_secret("db"), 'secret "db" not found in namespace "prod"'),
        (of_map("conf"), 'configmap "conf" not found in namespace "prod"'),
    ],
    ids=["secret", "config-map"],
)
def test_a_required_object_that_is_absent_is_named_with_kind_and_namespace(entry, words):
    with pytest.raises(Unresolved) as caught:
        composed(env_from=[entry])

    assert str(caught.value) == words


@pytest.mark.behaviour(229, 233)
@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (of_secret("db", key="user"), "couldn't find key user in Secret prod/db"),
        (of_map("conf", key="user"), "couldn't find key user in ConfigMap prod/conf"),
    ],
    ids=["secret", "config-map"],
)
def test_a_required_key_that_is_absent_has_a_message_of_its_own_and_no_value_of_others(origin, words):
    with pytest.raises(Unresolved) as caught:
        composed(
            env=[variable("A", **of_secret("db", key="k")), variable("B", **origin)],
            secrets={"db": a_secret(k=CANARY)},
            config_maps={"conf": a_config_map(k="v")},
        )

    assert str(caught.value) == words


@pytest.mark.behaviour(235)
@pytest.mark.field_case("FC-127")
def test_fields_are_those_of_the_pod_and_an_absent_label_is_an_empty_text():
    fields = {
        "NAME": "metadata.name",
        "NAMESPACE": "metadata.namespace",
        "UID": "metadata.uid",
        "LABEL": "metadata.labels['app.kubernetes.io/name']",
        "ANNOTATION": "metadata.annotations['note']",
        "ABSENT": "metadata.labels['absent']",
        "NODE": "spec.nodeName",
        "ACCOUNT": "spec.serviceAccountName",
    }
    made = composed(
        env=[variable(name, fieldRef={"fieldPath": path}) for name, path in fields.items()],
        metadata={"labels": {"app.kubernetes.io/name": "web"}, "annotations": {"note": "n"}},
    )

    assert made.variables == {
        "NAME": "a",
        "NAMESPACE": "prod",
        "UID": "u-1",
        "LABEL": "web",
        "ANNOTATION": "n",
        "ABSENT": "",
        "NODE": "nebula-fake",
        "ACCOUNT": "default",
    }


@pytest.mark.behaviour(235)
@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_an_indexed_job_gives_each_pod_its_index_wherever_it_is_written(where):
    key = "batch.kubernetes.io/job-completion-index"
    field = {"fieldPath": f"metadata.{where}['{key}']"}

    made = composed(env=[variable("JOB_COMPLETION_INDEX", fieldRef=field)], metadata={where: {key: "3"}})

    assert made.variables == {"JOB_COMPLETION_INDEX": "3"}


@pytest.mark.behaviour(236)
@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ({"resource": "limits.cpu"}, "2"),
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.memory"}, str(3 * 1024**3)),
        ({"resource": "limits.memory", "divisor": "1Gi"}, "3"),
        ({"resource": "limits.memory", "divisor": "2Gi"}, "2"),
        ({"resource": "limits.memory", "divisor": "0"}, str(3 * 1024**3)),
        ({"resource": "requests.cpu"}, "1"),
        ({"resource": "requests.ephemeral-storage"}, "0"),
        ({"resource": "limits.cpu", "containerName": "main", "divisor": "1"}, "2"),
    ],
)
def test_a_resource_is_the_containers_own_in_whole_divisors_rounded_up(reference, value):
    made = composed(
        env=[variable("A", resourceFieldRef=reference)],
        resources={"limits": {"cpu": "1500m", "memory": "3Gi"}, "requests": {"cpu": "500m"}},
    )

    assert made.variables == {"A": value}


@pytest.mark.behaviour(236)
@pytest.mark.parametrize(
    ("reference", "limits"),
    [
        ({"resource": "limits.cpu"}, {}),
        ({"resource": "limits.cpu"}, {"cpu": "0"}),
        ({"resource": "limits.hugepages-2Mi"}, {"cpu": "1"}),
        ({"resource": "limits.cpu", "containerName": "other"}, {"cpu": "1"}),
    ],
    ids=["unset", "zero", "hugepages", "another-container"],
)
def test_a_limit_that_only_a_nodes_capacity_could_stand_in_for_is_refused(reference, limits):
    container = a_container(
        env=[variable("A", resourceFieldRef=reference)], resources={"limits": limits} if limits else {}
    )

    (message,) = refusals(a_pod(container))

    assert message.startswith("spec.containers[main].env[A].valueFrom.resourceFieldRef ")


@pytest.mark.behaviour(235)
@pytest.mark.parametrize(
    "path", ["status.podIP", "status.hostIP", "metadata.labels", "metadata.annotations", "spec.hostname"]
)
@pytest.mark.field_case("FC-127")
def test_a_field_that_is_not_known_before_the_machine_runs_is_refused(path):
    (message,) = refusals(a_pod(a_container(env=[variable("A", fieldRef={"fieldPath": path})])))

    assert message.startswith("spec.containers[main].env[A].valueFrom.fieldRef ")
    assert path in message


@pytest.mark.behaviour(237)
def test_an_illegal_name_from_env_from_is_left_out_and_told_and_dots_are_legal():
    made = composed(
        env_from=[of_map("conf")],
        config_maps={"conf": {"data": {"1st": "a", "a b": "a", "a.b-c": "kept", "_x": "kept"}}},
    )

    assert made.variables == {"a.b-c": "kept", "_x": "kept"}
    assert made.skipped == (
        "Keys [1st, a b] from the EnvFrom configmap prod/conf were skipped since they are considered invalid"
        " environment variable names.",
    )


def test_a_prefix_may_make_a_name_legal():
    made = composed(env_from=[of_map("conf", prefix="N")], config_maps={"conf": a_config_map(**{"1": "a"})})

    assert made.variables == {"N1": "a"}


def test_references_see_resolved_values_of_before_and_resolved_values_are_not_read_again():
    made = composed(
        env=[
            {"name": "EARLY", "value": "$(LATE)"},
            variable("LATE", **of_secret("db", key="k")),
            {"name": "URL", "value": "pg://$(LATE)@$(HOST)/$$(LATE)"},
        ],
        env_from=[of_map("conf")],
        secrets={"db": a_secret(k="$(HOST)")},
        config_maps={"conf": a_config_map(HOST="db.local")},
    )

    assert made.variables == {
        "HOST": "db.local",
        "EARLY": "$(LATE)",
        "LATE": "$(HOST)",
        "URL": "pg://$(HOST)@db.local/$(LATE)",
    }


@pytest.mark.behaviour(231)
def test_an_object_that_is_referred_to_ten_times_is_asked_for_once():
    container = a_container(
        env=[variable(f"V{n}", **of_secret("db", key="k")) for n in range(9)],
        envFrom=[of_secret("db"), of_map("db")],
    )

    assert sources(container) == (Source(Kind.SECRET, "db"), Source(Kind.CONFIG_MAP, "db"))


@pytest.mark.behaviour(240)
def test_service_links_put_no_variable_into_the_environment():
    assert composed(spec={"enableServiceLinks": True}).variables == {}


@pytest.mark.behaviour(238)
def test_the_pod_is_not_rewritten_with_resolved_values():
    entry = variable("A", **of_secret("db", key="k"))

    composed(env=[entry], secrets={"db": a_secret(k=CANARY)})

    assert entry == variable("A", **of_secret("db", key="k"))


@pytest.mark.behaviour(144)
def test_what_holds_a_secret_is_known_also_by_way_of_a_reference():
    made = composed(
        env=[
            variable("DIRECT", **of_secret("db", key="k")),
            {"name": "URL", "value": "pg://$(DIRECT)@host"},
            {"name": "TWICE", "value": "$(URL)"},
            {"name": "ESCAPED", "value": "$$(DIRECT)"},
            {"name": "COVERED", "value": "plain"},
            variable("CONF", **of_map("conf", key="k")),
        ],
        env_from=[of_secret("all")],
        secrets={"db": a_secret(k=CANARY), "all": a_secret(COVERED=CANARY, WHOLE=CANARY)},
        config_maps={"conf": a_config_map(k="v")},
    )

    assert made.secret == ("DIRECT", "TWICE", "URL", "WHOLE")
    assert CANARY not in repr(made)


@pytest.mark.behaviour(233)
@pytest.mark.parametrize(
    "data", [{"k": "/w=="}, {"k": "AA=="}, {"k": "not base64"}], ids=["no-text", "zero-byte", "no-base64"]
)
def test_a_value_that_can_be_no_variable_is_an_error_that_names_the_key_alone(data):
    with pytest.raises(Unresolved, match="key k in Secret prod/db") as caught:
        composed(env_from=[of_secret("db")], secrets={"db": {"data": data}})

    assert data["k"] not in str(caught.value)
    assert caught.value.__cause__ is None
