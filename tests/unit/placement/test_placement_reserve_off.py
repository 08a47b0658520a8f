"""When the next candidate may begin though the lost one's claim is not released yet."""

import pytest

from app.placement.reserve import off
from app.provisioning.model import Released, Releasing, Why


@pytest.mark.parametrize("why", [Why.TERMINATING, Why.UNKNOWN])
def test_an_order_of_which_nobody_or_only_a_person_knows_is_waited_for_as_long_as_the_pool_says(why: Why):
    def after(unknown_s: float) -> Releasing:
        return Releasing(accepted=True, why=why, message="", after_s=1, unknown_s=unknown_s)

    assert not off(after(299), unknown_s=300)
    assert off(after(300), unknown_s=300)


@pytest.mark.parametrize("why", [Why.NO_STORE, Why.NO_CLUSTER, Why.NOT_LEADER])
def test_what_could_not_be_looked_at_is_waited_for_however_long_it_takes(why: Why):
    release = Releasing(accepted=True, why=why, message="", after_s=1, unknown_s=9999)
    assert not off(release, unknown_s=300)


def test_a_machine_whose_end_the_cloud_has_not_taken_is_waited_for():
    release = Releasing(accepted=False, why=Why.TERMINATING, message="", after_s=1)
    assert not off(release, unknown_s=300)
    assert off(Released(), unknown_s=300)
