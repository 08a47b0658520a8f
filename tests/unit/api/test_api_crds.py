"""The CRDs are what the models say, and nothing that the API server would refuse or leave unexplained."""

import dataclasses

import pytest

from app.api import crds
from app.api.not_built import NotBuilt

BY_KIND = pytest.mark.parametrize("kind", crds.KINDS, ids=lambda kind: kind.kind)


def nodes(schema, path=""):
    """Every node of a schema with its path."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


@BY_KIND
def test_every_field_is_described(kind):
    silent = [
        path
        for path, node in nodes(crds.structural_schema(kind))
        if not node.get("description") and not path.endswith("[]") and path != ".metadata"
    ]

    assert silent == []


@BY_KIND
def test_the_schema_has_nothing_but_what_a_structural_schema_knows(kind):
    known = {
        *("description", "type", "format", "enum", "default", "pattern", "required", "properties", "items"),
        *("additionalProperties", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems"),
        *("maxProperties", "x-kubernetes-validations"),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    }
    for path, node in nodes(crds.structural_schema(kind)):
        assert set(node) <= known, path
        assert isinstance(node["type"], str), path
        assert node.get("default", 0) is not None, path
        assert not isinstance(node.get("additionalProperties"), bool), path


@BY_KIND
def test_every_list_says_how_it_is_merged(kind):
    lists = {path: node for path, node in nodes(crds.structural_schema(kind)) if node["type"] == "array"}

    assert all("x-kubernetes-list-type" in node for node in lists.values()), lists.keys()


@BY_KIND
def test_fc_120_a_crd_that_stays_behind_points_to_no_server(kind):
    """A conversion webhook that is gone fails every list, and with it the cluster's garbage collection."""
    spec = next(crd for crd in crds.load_crds() if crd["spec"]["names"]["kind"] == kind.kind)["spec"]

    assert spec.get("conversion", {"strategy": "None"})["strategy"] == "None"
    assert [version["name"] for version in spec["versions"] if version["storage"]] == [
        spec["versions"][0]["name"]
    ]


@BY_KIND
def test_every_rule_has_a_message(kind):
    for path, node in nodes(crds.structural_schema(kind)):
        assert all(rule.get("message") for rule in node.get("x-kubernetes-validations", ())), path


def test_the_written_files_are_what_the_models_say(capsys):
    assert crds.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_a_drifted_file_is_shown_and_fails_the_check(tmp_path, capsys):
    crds.main(["--folder", str(tmp_path)])
    path = tmp_path / crds.KINDS[0].file_name
    path.write_text(path.read_text().replace("maxItems: 8", "maxItems: 9"))

    assert crds.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "-                  maxItems: 9\n+                  maxItems: 8\n" in capsys.readouterr().out


def test_a_missing_file_fails_the_check(tmp_path):
    assert crds.main(["--check", "--folder", str(tmp_path)]) == 1


def test_the_packaged_crds_are_the_generated_ones():
    assert crds.load_crds() == [crds.generate(kind) for kind in crds.KINDS]


def test_a_refused_field_has_no_default_that_would_set_it_off():
    row = NotBuilt(path=("failover", "reserveTimeout"), why="it is not there yet")
    kind = dataclasses.replace(crds.KINDS[0], not_built=(row,))

    failover = crds.structural_schema(kind)["properties"]["spec"]["properties"]["failover"]

    assert "default" not in failover["properties"]["reserveTimeout"]
    assert failover["properties"]["unknownTimeout"]["default"] == "5m"
