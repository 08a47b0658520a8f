"""Machines that may be ours under another name, or somebody's copies: each counts until a list clears it."""

from app.inventory.accounts import Accounts
from app.inventory.identity import Identity
from app.inventory.rounds import Inventory, Place
from app.settings import load
from providers.base import ClaimUid, Machine, MachineState, Ref, ResourceId

INSTALLATION = "abcdefghij"
CLAIM = ClaimUid("6f1c2f6e-6f0a-4bb4-9d6a-3f5f6f0f8a01")
PLACE = Place(provider="cloud", account="default", region="")


def an_inventory() -> Inventory:
    settings = load({"profile": "fast"}, {})

    async def prepared(_account: object) -> None:
        """Nothing is listed here."""

    return Inventory(
        accounts=Accounts(settings, INSTALLATION),
        installation=INSTALLATION,
        settings=settings,
        scope=lambda _key: (),
        recorded_account=lambda _key: "",
        prepare=prepared,
    )


def a_copy(name: str, *, sequence: int = 7, installation: str = INSTALLATION) -> Machine:
    carried = Identity(installation=installation, claim_uid=CLAIM, attempt=1, sequence=sequence)
    ref = Ref(provider="cloud", account="default", region="", resource_id=ResourceId(name))
    return Machine(ref=ref, identity=None, state=MachineState.RUNNING, maybe=str(carried))


def test_each_machine_in_doubt_of_a_claim_is_told_and_no_other():
    """The first may be the one that is on record: then it is the second that keeps the attempt open."""
    inventory = an_inventory()
    others = [a_copy("other attempt", sequence=8), a_copy("foreign", installation="zyxwvutsrq")]

    inventory._doubt(PLACE, [a_copy("b"), a_copy("a"), *others], 1.0, complete=True)

    assert inventory.doubts(CLAIM, PLACE, sequences=[7]) == ["a", "b"]
    assert inventory.doubts(ClaimUid("another"), PLACE, sequences=[7]) == []


def test_a_doubt_lasts_until_a_whole_list_lacks_it():
    inventory = an_inventory()
    inventory._doubt(PLACE, [a_copy("a")], 1.0, complete=True)

    inventory._doubt(PLACE, [], 2.0, complete=False)
    assert inventory.doubts(CLAIM, PLACE, sequences=[7]) == ["a"]

    inventory._doubt(PLACE, [], 3.0, complete=True)
    assert inventory.doubts(CLAIM, PLACE, sequences=[7]) == []
