"""Accelerators, sizes and options that no cloud has: refused once that is certain, and never before."""

from dataclasses import replace
from decimal import Decimal

import pytest
from admission_makers import a_stock, applied, opted_in, sells

from app.admission.rules import mutate, validate
from catalog.catalogue import Catalogue, CloudRows, load
from providers.base import OptionSpec, Tier, Traits

TYPE = "nebula.inftyai.com/accelerator-type"
GIB = 2**30


def asking(kind, count=None, **container):
    pod = opted_in(labels={TYPE: kind}, gpus=count)
    resources = pod["spec"]["containers"][0].setdefault("resources", {})
    for part, amounts in container.items():
        resources.setdefault(part, {}).update(amounts)
    return pod


def refusals(pod, stock):
    """What is said by both webhooks, which is the same."""
    mutated = mutate(pod, stock=stock).refusals
    final = applied(pod) if not mutated else pod
    assert mutated or not validate(final, stock=stock).refusals
    return mutated


@pytest.mark.behaviour(24)
@pytest.mark.parametrize("kind", ["h100", "H100", "a100-80gb"])
def test_an_accelerator_that_a_cloud_has_is_let_through_in_any_casing(kind):
    stock = a_stock(acme=sells("acme", "H100", "A100-80GB"))

    assert refusals(asking(kind, "8"), stock) == ()


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("h10", "did you mean H100?"),
        ("A100", "did you mean A100-80GB"),
        ("quantum", "known: A100-80GB, H100"),
    ],
)
def test_an_accelerator_that_no_cloud_has_is_refused_with_near_matches(kind, hint):
    stock = a_stock(acme=sells("acme", "H100", "A100-80GB"))

    (reason,) = refusals(asking(kind, "8"), stock)

    assert f'label {TYPE}: no cloud has an accelerator "{kind}"' in reason
    assert hint in reason


def test_it_is_gated_while_any_configured_account_has_not_told_its_offers():
    """What is not known yet is never absent: the account that did not answer may be the one that has it."""
    told = sells("acme", "H100")

    assert refusals(asking("h10", "8"), a_stock("other", acme=told)) == ()
    assert refusals(asking("h10", "8"), a_stock("acme")) == ()
    assert refusals(asking("h10", "8"), a_stock()) == ()
    assert len(refusals(asking("h10", "8"), a_stock(acme=told, other=()))) == 1


def test_an_accelerator_of_a_catalogue_whose_cloud_is_not_configured_is_let_through():
    """Another configuration could mend it."""
    stock = a_stock(acme=sells("acme", "H100"), catalogue=load())

    assert refusals(asking("T4", "4"), stock) == ()


@pytest.mark.behaviour(25)
@pytest.mark.parametrize(("kind", "count"), [("T4", "4"), ("H100", "3")])
def test_what_only_a_cloud_that_is_not_configured_has_is_let_through_with_a_warning_that_names_it(
    kind, count
):
    """The Pod will wait, and whoever made it learns at once for what."""
    rows = CloudRows(adapter="zeta", rows=tuple(sells("zeta", "T4", "H100", counts=(3, 4))))
    stock = a_stock(
        acme=sells("acme", "H100", counts=(1, 2)),
        catalogue=Catalogue(clouds={"zeta": replace(rows, accelerators=frozenset({"T4", "H100"}))}),
    )
    pod = applied(asking(kind, count), stock=stock)

    verdict = validate(pod, stock=stock)

    assert verdict.refusals == ()
    assert verdict.warnings == (
        f"no configured provider has {count} nvidia.com/gpu of type {kind} in one machine: the Pod stays"
        " gated until one that has is configured (known: zeta)",
    )
    assert validate(applied(asking("H100", "2"), stock=stock), stock=stock).warnings == ()


def test_an_alias_of_a_catalogue_is_an_accelerator():
    cloud = CloudRows(adapter="acme", aliases={"h100-80gb": "H100"}, accelerators=frozenset({"H100"}))
    stock = a_stock(acme=sells("acme", "B200"), catalogue=Catalogue(clouds={"acme": cloud}))

    (reason,) = refusals(asking("h100-80g", "8"), stock)

    assert "did you mean H100 or h100-80gb" in reason


@pytest.mark.behaviour(25)
def test_a_count_that_no_cloud_has_is_refused_with_those_there_are():
    stock = a_stock(acme=sells("acme", "H100", counts=(1, 8)), other=sells("other", "H100", counts=(2,)))

    (reason,) = refusals(asking("h100", "3"), stock)

    assert "3 nvidia.com/gpu of type h100" in reason
    assert "ask for one of 1, 2, 8" in reason
    assert refusals(asking("h100", "2"), stock) == ()


@pytest.mark.behaviour(28)
def test_an_offer_without_a_count_is_for_every_count():
    assert refusals(asking("h100", "512"), a_stock(acme=sells("acme", "H100", counts=(0,)))) == ()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"memory": "3Ti"}, "memory"),
        ({"cpu": "200"}, "cpu"),
        ({"ephemeral-storage": "2Ti"}, "ephemeral-storage"),
    ],
)
@pytest.mark.field_case("FC-039")
def test_039_what_is_larger_than_any_machine_is_refused_by_its_field_and_the_largest_size(asked, field):
    """Field case FC-039: what can be used of a machine decides, not its nominal size."""
    rows = sells("acme", "H100", cpu=Decimal(192), memory_bytes=2000 * GIB, disk_bytes=1000 * GIB)

    (reason,) = refusals(asking("h100", "8", requests=asked), a_stock(acme=rows))

    assert f"spec.containers[main].resources[{field}]: no machine with h100:8 has so much" in reason


def test_039_a_size_is_let_through_where_one_machine_may_hold_it():
    small = sells("acme", "H100", memory_bytes=100 * GIB)
    large, silent = sells("b", "H100", memory_bytes=200 * GIB), sells("c", "H100")
    pod = asking("h100", "8", limits={"memory": "150Gi"})

    assert len(refusals(pod, a_stock(acme=small))) == 1
    assert refusals(pod, a_stock(acme=small, b=large)) == ()
    assert refusals(pod, a_stock(acme=small, c=silent)) == ()
    assert refusals(pod, a_stock("c", acme=small)) == ()


def test_039_a_machine_of_a_catalogue_whose_cloud_is_not_configured_may_hold_it():
    small = sells("acme", "H100", memory_bytes=100 * GIB)
    pod = asking("h100-80gb", "8", limits={"memory": "1Ti"})

    assert refusals(pod, a_stock(acme=small, catalogue=load())) == ()
    assert len(refusals(asking("h100", "8", limits={"memory": "1Ti"}), a_stock(acme=small))) == 1


@pytest.mark.field_case("FC-039")
def test_039_sizes_that_only_two_machines_have_are_not_had_by_one():
    rows = [
        *sells("acme", "H100", cpu=Decimal(8), memory_bytes=100 * GIB, region="a"),
        *sells("acme", "H100", cpu=Decimal(64), memory_bytes=10 * GIB, region="b"),
    ]

    (reason,) = refusals(asking("h100", "8", limits={"cpu": "64", "memory": "100Gi"}), a_stock(acme=rows))

    assert "has all of it together" in reason


CLOUD = OptionSpec(name="cloud", meaning="which part of the cloud", pattern="SECURE|COMMUNITY")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ("runpod-cloud=SECURE", ""),
        ("runpod-cloud=secure", "must match SECURE|COMMUNITY"),
        ("runpod-clod=SECURE", "did you mean cloud?"),
        ("runpod-disk=3", "it has cloud"),
        ("vast-verified2=x", ""),
    ],
    ids=["right", "value", "slip", "unknown", "not-configured"],
)
def test_an_option_is_checked_against_what_its_provider_declares(annotation, words):
    traits = Traits(tiers=frozenset(Tier), options=(CLOUD,))
    stock = a_stock(runpod=sells("runpod", "H100"), traits=traits)
    key, _, value = annotation.partition("=")
    pod = opted_in(annotations={f"cloud.aibrix.ai/{key}": value})

    reasons = mutate(pod, stock=stock).refusals

    assert [words in reason and key in reason for reason in reasons] == ([True] if words else [])
    assert mutate(pod, stock=a_stock("runpod")).refusals == ()


def test_an_option_belongs_to_the_provider_with_the_longest_name_that_fits():
    traits = Traits(tiers=frozenset(Tier), options=(CLOUD,))
    stock = a_stock(**{"a": sells("a", "H100"), "a-b": sells("a-b", "H100")}, traits=traits)

    assert mutate(opted_in(annotations={"cloud.aibrix.ai/a-b-cloud": "SECURE"}), stock=stock).refusals == ()


def test_more_options_than_a_claim_can_hold_are_refused():
    names = {f"cloud.aibrix.ai/x-{number}": "1" for number in range(65)}

    (reason,) = mutate(opted_in(annotations=names)).refusals

    assert "65 annotations of cloud.aibrix.ai; at most 64" in reason
    names.popitem()
    assert mutate(opted_in(annotations=names)).refusals == ()


def test_an_option_longer_than_a_claim_can_hold_is_refused_by_its_name():
    pod = opted_in(annotations={"cloud.aibrix.ai/x-a": "1" * 1025, "cloud.aibrix.ai/x-b": "1" * 1024})

    (reason,) = mutate(pod).refusals

    assert "longer than 1024 characters: annotation cloud.aibrix.ai/x-a;" in reason


@pytest.mark.parametrize("price", ["", "0", "-1", "two", "1,5", "1e3", "$2", "nan", "0.0000000001"])
def test_a_ceiling_that_is_no_price_is_refused_by_its_name(price):
    (reason,) = mutate(opted_in(annotations={"cloud.aibrix.ai/max-price": price})).refusals

    assert "cloud.aibrix.ai/max-price" in reason
