"""Which login pulls which image, and what is no login."""

import base64

import orjson
import pytest

from app.workload.registries import BadPullSecret, entries, is_image, login_for
from providers.base import RegistryLogin, Workload

CANARY = "canary-5f2d"


def a_pull_secret(auths, *, kind="kubernetes.io/dockerconfigjson"):
    key = ".dockerconfigjson" if kind.endswith("json") else ".dockercfg"
    told = {"auths": auths} if kind.endswith("json") else auths
    return {"type": kind, "data": {key: base64.b64encode(orjson.dumps(told)).decode()}}


def login(image, *secrets):
    return login_for(image, [entry for secret in secrets for entry in entries(secret)])


def named(user):
    return {"username": user, "password": CANARY}


@pytest.mark.parametrize(
    ("where", "image", "found"),
    [
        ("ghcr.io", "ghcr.io/org/app:1", True),
        ("https://ghcr.io", "ghcr.io/org/app", True),
        ("https://ghcr.io/v2/", "ghcr.io/org/app", True),
        ("ghcr.io", "ghcr.io.evil.example/org/app", False),
        ("ghcr.io", "org/app", False),
        ("https://index.docker.io/v1/", "app", True),
        ("https://index.docker.io/v1/", "docker.io/org/app:1", True),
        ("docker.io", "org/app@sha256:" + "a" * 64, True),
        ("*.example.com", "a.example.com/app", True),
        ("*.example.com", "a.b.example.com/app", False),
        ("*.example.com", "example.com/app", False),
        ("registry.local:5000", "registry.local:5000/app", True),
        ("registry.local:5000", "registry.local/app", False),
        ("ghcr.io/org", "ghcr.io/org/app", True),
        ("ghcr.io/org", "ghcr.io/organisation/app", False),
        ("localhost", "localhost/app", True),
    ],
)
@pytest.mark.field_case("FC-123")
def test_a_login_is_for_the_images_of_its_registry_and_for_no_others(where, image, found):
    assert (login(image, a_pull_secret({where: named("u")})) is not None) is found


def test_the_longest_path_wins_and_then_the_first_secret():
    first = a_pull_secret({"ghcr.io": named("first"), "ghcr.io/org": named("org")})
    second = a_pull_secret({"ghcr.io": named("second")})

    assert login("ghcr.io/org/app", second, first).username == "org"
    assert login("ghcr.io/else/app", first, second).username == "first"


@pytest.mark.parametrize("kind", ["kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"])
@pytest.mark.field_case("FC-123")
def test_user_and_password_may_be_told_as_one(kind):
    auth = base64.b64encode(f"user:pass:{CANARY}".encode()).decode()

    found = login("ghcr.io/app", a_pull_secret({"ghcr.io": {"auth": auth}}, kind=kind))

    assert found == RegistryLogin(server="ghcr.io", username="user", password=f"pass:{CANARY}")
    assert CANARY not in repr(found)


def test_an_entry_without_a_password_is_passed_over():
    assert login("ghcr.io/app", a_pull_secret({"ghcr.io": {"identitytoken": CANARY}})) is None


@pytest.mark.parametrize(
    "secret",
    [
        {"type": "Opaque", "data": {".dockerconfigjson": CANARY}},
        {"type": "kubernetes.io/dockerconfigjson", "data": {}},
        {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": CANARY}},
        a_pull_secret([CANARY]),
        a_pull_secret({"ghcr.io": CANARY}),
        a_pull_secret({"ghcr.io": {"auth": CANARY}}),
    ],
    ids=["another-type", "no-key", "no-json", "a-list", "a-text", "no-base64"],
)
@pytest.mark.field_case("FC-123")
def test_a_secret_that_holds_no_logins_is_an_error_without_its_content(secret):
    with pytest.raises(BadPullSecret) as caught:
        entries(secret)

    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("image", "valid"),
    [
        ("app", True),
        ("nvidia/cuda:12.4.1-base-ubuntu22.04", True),
        ("registry.local:5000/a/b_c/d.e:tag@sha256:" + "0" * 64, True),
        ("App", False),
        ("my app", False),
        ("app:", False),
        ("ghcr.io//app", False),
        ("$(IMAGE)", False),
        ("", False),
        ("a" * 501, False),
    ],
)
def test_what_no_node_could_pull_is_told_by_its_name(image, valid):
    assert is_image(image) is valid


@pytest.mark.behaviour(144)
def test_what_a_cloud_quotes_from_a_request_is_masked():
    login = RegistryLogin(server="ghcr.io", username="u", password="pass-word")
    workload = Workload(
        image="app",
        args=(f"--token={CANARY}",),
        env={"TOKEN": CANARY, "PEM": "-----\nline-one\nline-two", "PIN": "1", "PLAIN": "eight-thousand"},
        secret_env=("PEM", "PIN", "TOKEN"),
        registry=login,
    )

    said = f"bad {CANARY} at line-two by pass-word on port 8001 of eight-thousand"
    assert workload.masked(said) == "bad [hidden] at [hidden] by [hidden] on port 8001 of eight-thousand"
    assert CANARY not in repr(workload)
