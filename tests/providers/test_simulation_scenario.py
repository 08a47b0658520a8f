"""Scenario files: what is wrong is named by its field, and what we ship is right."""

from decimal import Decimal
from pathlib import Path

import pytest

from providers.fake.simulator import DEFAULT_SCENARIO
from providers.simulation.scenario import ScenarioError, load, parse

SAMPLES = Path(__file__).parents[2] / "docs" / "samples" / "scenarios"

GOOD = "offers: [{accelerator: H100, usd_per_hour: {Spot: 4.2}}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mapping"),
        ("offers: [", "not YAML"),
        ("cloud: x", "offers: Field required"),
        ("offers: []", "offers: "),
        (GOOD + "\nregoin: [r1]", "regoin: "),
        (GOOD + "\nlife: {boot_s: -1}", "life.boot_s: "),
        (GOOD + "\nlife: {exit_code: 256}", "life.exit_code: "),
        (GOOD + "\nlag: {list_create: 1}", "lag.list_create: "),
        (GOOD + "\nregions: [r1, r1]", "regions names one region twice"),
        (GOOD + "\nlists: regional", "needs regions"),
        ("offers: [{accelerator: H100, usd_per_hour: {Spt: 1}}]", "offers.0.usd_per_hour.Spt"),
        ("offers: [{accelerator: H100, usd_per_hour: {Spot: cheap}}]", "offers.0.usd_per_hour.Spot"),
        ("offers: [{counts: [2], usd_per_hour: {Spot: 1}}]", "offers.0: counts needs an accelerator"),
        (
            "offers: [{accelerator: H100, usd_per_hour: {Spot: 1}, capacity: {OnDemand: 1}}]",
            "offers.0: capacity names OnDemand",
        ),
        ("offers: [{accelerator: H100, usd_per_hour: {Spot: 1}, regions: [r9]}]", "offers.0.regions: r9"),
        (
            "offers: [{accelerator: L4, usd_per_hour: {Spot: 1}},{accelerator: l4, usd_per_hour: {Spot: 2}}]",
            "offers.1: l4 is offered twice",
        ),
    ],
)
def test_an_error_names_the_file_and_the_field(text: str, said: str):
    with pytest.raises(ScenarioError) as caught:
        parse(text, source="my.yaml")

    assert str(caught.value).startswith("my.yaml: ")
    assert said in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ScenarioError, match=r"nowhere\.yaml"):
        load(Path("/nowhere.yaml"))


def test_a_price_is_what_was_written_not_its_binary_neighbour():
    (offer,) = parse("offers: [{accelerator: H100, usd_per_hour: {Spot: 4.2}}]").offers

    assert list(offer.usd_per_hour.values()) == [Decimal("4.2")]


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_samples_can_be_used(path: Path):
    assert load(path).cloud == path.stem


def test_the_default_cloud_has_the_usual_cards_in_both_tiers():
    scenario = parse(DEFAULT_SCENARIO)

    assert {offer.accelerator for offer in scenario.offers} >= {"H100", "A100", "L4", "T4", None}
    assert sorted(scenario.tiers) == ["OnDemand", "Spot"]
    assert len(scenario.regions) == 1
