"""A key that is nearly one of ours is refused, since an ignored one spends money."""

import pytest

from app.admission.spelling import misspelt, not_opted_in
from app.api import keys


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"annotations": {"cloud.aibrix.ai/maxprice": "1"}}, "did you mean cloud.aibrix.ai/max-price?"),
        ({"annotations": {"cloud.aibrix.ai/max_price": "1"}}, "did you mean cloud.aibrix.ai/max-price?"),
        ({"annotations": {"nebula.inftyai.com/max-price": "1"}}, "did you mean cloud.aibrix.ai/max-price?"),
        (
            {"labels": {"nebula.inftyai.com/acelerator-type": "h100"}},
            "did you mean nebula.inftyai.com/accelerator-type?",
        ),
        ({"labels": {"nebula.inftyai.com/zzz": "x"}}, "label nebula.inftyai.com/zzz is not known"),
    ],
    ids=["run-together", "underscore", "our-group", "label", "no-near-name"],
)
def test_a_key_that_would_be_ignored_is_refused_with_the_near_name(metadata, words):
    (found,) = misspelt(metadata)

    assert words in found


def test_what_is_known_or_anothers_is_let_through():
    labels = {
        keys.ENABLED_LABEL: "true",
        keys.NODE_POOL_LABEL: "p",
        keys.ACCELERATOR_TYPE_LABEL: "t",
        "app": "x",
    }
    annotations = {
        keys.MAX_PRICE_ANNOTATION: "1",
        keys.REGION_ANNOTATION: "cleared",
        "cloud.aibrix.ai/runpod-cloud": "COMMUNITY",
        "cloud.aibrix.ai/vast-machine-id": "7",
        "example.com/maxprice": "1",
    }

    assert misspelt({"labels": labels, "annotations": annotations}) == []


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({keys.ENABLED_LABEL: "True"}, "label nebula.inftyai.com/enabled is 'True', not 'true'"),
        ({keys.ENABLED_LABEL: ""}, "label nebula.inftyai.com/enabled is '', not 'true'"),
        ({"nebula.inftyai.com/enable": "true"}, "by nebula.inftyai.com/enable?"),
        ({"nebula.infytai.com/enabled": "true"}, "by nebula.infytai.com/enabled?"),
        ({"inftyai.com/enabled": "true", keys.NODE_POOL_LABEL: "p"}, "by inftyai.com/enabled?"),
        ({keys.NODE_POOL_LABEL: "p"}, "it has labels of nebula.inftyai.com, but not"),
    ],
)
def test_a_pod_that_is_almost_opted_in_gets_a_warning(labels, words):
    (warning,) = not_opted_in({"labels": labels})

    assert warning.startswith("no machine is rented for this Pod: ")
    assert words in warning


@pytest.mark.parametrize("said", ["true", "false"])
def test_a_pod_that_says_what_it_wants_gets_none(said: str):
    assert not_opted_in({"labels": {keys.ENABLED_LABEL: said, keys.NODE_POOL_LABEL: "p"}}) == []
    assert not_opted_in({"labels": {"app": "x"}}) == []
    assert not_opted_in({}) == []
