"""What a pool's author is told at once; nothing here is refused."""

from dataclasses import replace

import pytest
from admission_makers import a_stock, sells

from app.admission.pools import warn_of_pool
from app.admission.rules import ALLOWED
from catalog.catalogue import load
from catalog.offerings import Offerings
from catalog.stock import Stock
from providers.base import Tier, Traits


def a_pool(*providers, **spec):
    entries = [{"name": each} if isinstance(each, str) else each for each in providers]
    return {"metadata": {"name": "gpu"}, "spec": {"providers": entries, **spec}}


def aws(**offers):
    """AWS as its catalogue file alone knows it, under the configured name."""
    known, catalogue = Offerings(), load()
    known.put("aws", "default", traits=Traits(tiers=frozenset(Tier)), written=catalogue.of("aws"))
    return Stock(offerings=known, catalogue=catalogue, configured=frozenset({("aws", "default")}))


def test_a_provider_that_is_not_configured_is_a_warning_with_the_nearest_name():
    verdict = warn_of_pool(a_pool("aws", "modle"), stock=a_stock("aws", "modal"))

    assert verdict.refusals == ()
    (warning,) = verdict.warnings
    assert '"modle"' in warning
    assert "aws, modal" in warning
    assert "did you mean modal?" in warning
    assert warn_of_pool(a_pool("aws", "modle"), stock=a_stock("aws", "modle")) == ALLOWED


def test_an_account_that_is_not_configured_is_a_warning():
    (warning,) = warn_of_pool(a_pool({"name": "aws", "account": "spare"}), stock=a_stock("aws")).warnings

    assert 'account "spare" of "aws"' in warning
    assert "(configured: default)" in warning


@pytest.mark.parametrize(
    ("regions", "warned"),
    [
        (["us"], ""),
        (["us-east-1", "EU"], ""),
        (["me-south-1"], ""),  # must be opted in to, and is reached by its own name
        (["us-esat-1"], "us-east-1"),
    ],
)
def test_a_region_that_looks_like_a_slip_is_a_warning(regions, warned):
    warnings = warn_of_pool(a_pool({"name": "aws", "regions": regions}), stock=aws()).warnings

    assert [warned in warning for warning in warnings] == ([True] if warned else [])


def test_a_region_is_a_warning_where_all_regions_are_known():
    stock = a_stock(acme=sells("acme", "H100", region="north"))

    (warning,) = warn_of_pool(a_pool({"name": "acme", "regions": ["mars"]}), stock=stock).warnings

    assert '"mars" is no region' in warning


def test_nothing_is_said_of_the_regions_of_a_cloud_whose_regions_are_not_known():
    pool = a_pool({"name": "modal", "regions": ["us-west"]})

    assert warn_of_pool(pool, stock=a_stock("modal")) == ALLOWED
    assert warn_of_pool(pool, stock=a_stock(modal=sells("modal", "H100"))) == ALLOWED


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"capacityTypes": ["Spot"]}, "spec.capacityTypes"),
        ({"egress": {"mode": "Blocked"}}, "spec.egress"),
    ],
)
def test_a_pool_that_can_never_serve_is_a_warning_once_all_its_accounts_are_known(spec, field):
    pool = a_pool("acme", **spec)
    open_account = a_stock(acme=sells("acme", "H100"))

    (warning,) = warn_of_pool(pool, stock=open_account).warnings

    assert warning.startswith(f"{field}: no provider of this pool")
    assert warn_of_pool(pool, stock=a_stock("acme")) == ALLOWED
    able = replace(Traits(tiers=frozenset(Tier)), enforces_egress=True)
    assert warn_of_pool(pool, stock=a_stock(acme=sells("acme", "H100"), traits=able)) == ALLOWED


def test_a_pool_of_another_version_s_shape_is_not_an_error():
    assert warn_of_pool(
        {"metadata": {}, "spec": {"providers": [None, {"name": "aws"}]}}, stock=a_stock("aws")
    )
