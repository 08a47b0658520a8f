"""Each kind of bad input has a test that proves its one clear error: this page leads to them."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROOFS = {
    "unknown provider in a pool": ("unit/admission/test_admission_pools.py", "test_a_provider_that_is_not_"),
    "unknown provider at start": ("unit/settings/test_settings.py", "test_the_command_refuses_to_start"),
    "unknown account": ("unit/admission/test_admission_pools.py", "test_an_account_that_is_not_configured"),
    "unknown region": ("unit/admission/test_admission_pools.py", "test_a_region_that_looks_like_a_slip"),
    "unknown tier, strategy; zero and broken limits, weights, prices": (
        "cluster/api/test_crds_on_a_real_api_server.py",
        "test_a_malformed_pool_is_refused",
    ),
    "malformed durations": (
        "cluster/api/test_crds_on_a_real_api_server.py",
        "test_what_is_no_positive_duration_is_refused",
    ),
    "unknown accelerator": ("unit/admission/test_admission_sold.py", "test_an_accelerator_that_no_cloud_has"),
    "unknown count": ("unit/admission/test_admission_sold.py", "test_a_count_that_no_cloud_has_is_refused"),
    "a size that no cloud has": ("unit/admission/test_admission_sold.py", "test_039_what_is_larger_than_any"),
    "unknown pool": ("cluster/placement/test_placement_controller.py", "test_a_pool_that_comes_later_wakes"),
    "zero, negative, fractional counts, counts without a type": (
        "unit/workload/test_workload_accelerators.py",
        "test_a_count_that_makes_no_sense",
    ),
    "a fraction through a controller": (
        "cluster/admission/test_admission_of_what_is_sold.py",
        "test_fc_033_a_part_of_a_gpu",
    ),
    "a GPU in requests only": (
        "cluster/admission/test_admission_of_what_is_sold.py",
        "test_fc_032_a_gpu_in_requests_only",
    ),
    "malformed prices on a Pod": (
        "unit/placement/test_placement_request.py",
        "test_a_ceiling_that_is_no_price",
    ),
    "annotations that would be ignored": (
        "unit/placement/test_placement_request.py",
        "test_an_annotation_that_would_be_ignored",
    ),
    "misspelt labels and annotations": (
        "unit/admission/test_admission_spelling.py",
        "test_a_key_that_would_be_ignored_is_refused_with_t",
    ),
    "a pool that can never serve": (
        "unit/admission/test_admission_pools.py",
        "test_a_pool_that_can_never_serve",
    ),
    "a broken catalogue row": ("unit/catalog/test_catalog_rows.py", "test_a_broken_row_is_an_error"),
    "several broken catalogue files": ("unit/catalog/test_catalog_rows.py", "test_every_error_of_every_file"),
    "an unusable KUBECONFIG": ("cluster/start/test_start.py", "test_a_kubeconfig_that_cannot_be_used"),
    "missing CRDs": ("cluster/start/test_start.py", "test_kinds_that_the_cluster_does_not_serve"),
    "missing rights": ("cluster/start/test_start.py", "test_every_right_that_is_missing"),
    "spoofed annotations (405, 407)": ("cluster/admission/test_admission_of_pods.py", "test_405_407_"),
    "a spoofed region annotation (406)": (
        "cluster/placement/test_placement_controller.py",
        "test_annotations_that_only_we_may_set_do_not_survive",
    ),
    "nodeName and selector by hand (408)": (
        "cluster/vnode/test_vnode_refusals.py",
        "test_a_pod_without_a_claim_gets_config_error_and_n",
    ),
    "the gate taken off by hand (409)": (
        "cluster/reserve/test_reserve_interrupted.py",
        "test_a_pod_whose_gate_somebody_else_takes_off_lose",
    ),
    "labels edited after placement (410)": (
        "cluster/placement/test_placement_controller.py",
        "test_what_a_user_edits_after_placement",
    ),
    "the opt-in label taken off (411)": (
        "cluster/placement/test_placement_controller.py",
        "test_a_pod_that_is_opted_out",
    ),
    "a claim edited or deleted (412)": (
        "cluster/api/test_crds_on_a_real_api_server.py",
        "test_the_spec_of_a_claim_cannot_be_changed",
    ),
}


@cache
def names_in(file: str) -> tuple[str, ...]:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("what", PROOFS)
def test_the_proof_is_there(what):
    file, name = PROOFS[what]

    assert any(each.startswith(name) for each in names_in(file))
