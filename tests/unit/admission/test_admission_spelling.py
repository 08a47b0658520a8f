"""A key that is nearly one of ours is refused, since an ignored one spends money."""

import pytest

from app.admission.spelling import misspelt
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
