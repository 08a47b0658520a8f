"""Equal parts of cached objects are one object, and nothing that they say is another's."""

import copy
from typing import Any

from app.kube.sharing import Shares


def pod(name: str, *, image: str = "a:1", ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app": "a"}, "ownerReferences": [{"uid": "u"}]},
        "spec": {
            "nodeName": "n",
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "resources": {"limits": {"cpu": "1"}},
                    "volumeMounts": [{"name": f"kube-api-access-{name}"}],
                }
            ],
            "volumes": [{"name": f"kube-api-access-{name}", "projected": {"sources": [{"path": "token"}]}}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
    }


def test_siblings_share_what_they_both_say_and_nothing_else():
    shares = Shares()
    one, other = pod("one"), pod("other", image="b:2", ready="False")
    before = copy.deepcopy([one, other])
    shares.share(one)
    shares.share(other)

    assert [one, other] == before
    assert one["metadata"]["labels"] is other["metadata"]["labels"]
    assert one["metadata"]["ownerReferences"] is other["metadata"]["ownerReferences"]
    assert one["spec"]["tolerations"] is other["spec"]["tolerations"]
    assert one["spec"]["containers"] is not other["spec"]["containers"]
    (container,), (others,) = one["spec"]["containers"], other["spec"]["containers"]
    assert container["resources"] is others["resources"]
    assert container["volumeMounts"] is not others["volumeMounts"]
    (volume,), (theirs,) = one["spec"]["volumes"], other["spec"]["volumes"]
    assert volume["projected"] is theirs["projected"]
    assert one["status"]["conditions"][0] is not other["status"]["conditions"][0]


def test_what_is_remembered_is_bounded_and_forgetting_changes_no_object():
    shares = Shares(most=2)
    pods = [pod(str(n), image=f"a:{n}") for n in range(5)]
    before = copy.deepcopy(pods)
    for each in pods:
        shares.share(each)

    assert pods == before
    assert len(shares._seen) <= 2


def test_an_object_without_spec_or_status_is_left_as_it_is():
    bare: dict[str, Any] = {"metadata": {"name": "x"}, "status": None}
    Shares().share(bare)
    assert bare == {"metadata": {"name": "x"}, "status": None}
