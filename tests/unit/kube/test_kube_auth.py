"""Finding the API server, and credentials that change. No server is needed to read a configuration."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.kube import auth


def a_kubeconfig(path: Path, name: str, *, server="http://127.0.0.1:1", user=None, current=True) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server}}],
        "users": [{"name": name, "user": user or {}}] if user is not None else [],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
    if current:
        config["current-context"] = name
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No configuration of the machine that runs the test is found."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_library_version_is_the_one_whose_loaders_are_known():
    """The stand-ins rely on what the loaders import and on a few private names. Read its config package again
    before raising this."""
    assert importlib.metadata.version("kubernetes_asyncio") == "36.1.0"


def test_no_model_of_the_library_is_ever_loaded(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c", user={"token": "t"})
    script = f"""
import asyncio, sys
from app.kube import auth
connection = asyncio.run(auth.connect(kubeconfig={str(path)!r}))
assert connection.base_url == "http://127.0.0.1:1"
print([name for name in sys.modules if name.startswith("kubernetes_asyncio")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"


def test_somebody_who_wants_the_whole_library_still_gets_it():
    """The stand-ins are gone again, so a real import afterwards is whole."""
    script = """
from app.kube import auth
auth._loaders()
import kubernetes_asyncio.client
assert kubernetes_asyncio.client.Configuration is not auth.Configuration
assert kubernetes_asyncio.client.CoreV1Api
auth._loaders.cache_clear()
auth._loaders()
import sys
assert sys.modules["kubernetes_asyncio.client"] is kubernetes_asyncio.client
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


async def test_without_any_configuration_the_message_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(auth.NoCluster, match=r"no kubeconfig at .*/home/\.kube/config"):
        await auth.connect()


async def test_the_variable_is_used_before_the_cluster_and_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(a_kubeconfig(tmp_path / "one", "one", user={"token": "t"})))

    connection = await auth.connect()

    assert connection.base_url == "http://127.0.0.1:1"
    assert await connection.headers() == {"Authorization": "Bearer t"}


async def test_the_home_folder_is_used_at_last(tmp_path):
    folder = tmp_path / "home" / ".kube"
    folder.mkdir(parents=True)
    a_kubeconfig(folder / "config", "c", server="http://127.0.0.1:2", user={})

    assert (await auth.connect()).base_url == "http://127.0.0.1:2"


async def test_of_several_files_the_first_to_name_a_context_wins_and_the_rest_are_merged(tmp_path):
    """As kubectl does; missing and empty files are passed over."""
    empty = tmp_path / "empty"
    empty.write_text("")
    users = a_kubeconfig(tmp_path / "first", "one", server="http://127.0.0.1:1", user={"token": "one"})
    other = a_kubeconfig(tmp_path / "second", "two", server="http://127.0.0.1:2", user={"token": "two"})
    paths = ":".join(map(str, (tmp_path / "missing", empty, users, other)))

    first = await auth.connect(kubeconfig=paths)
    second = await auth.connect(kubeconfig=paths, context="two")

    assert (first.base_url, await first.headers()) == (
        "http://127.0.0.1:1",
        {"Authorization": "Bearer one"},
    )
    assert (second.base_url, await second.headers()) == (
        "http://127.0.0.1:2",
        {"Authorization": "Bearer two"},
    )


async def test_a_context_that_is_not_there_is_named(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c", user={})

    with pytest.raises(auth.NoCluster, match="elsewhere"):
        await auth.connect(kubeconfig=str(path), context="elsewhere")


async def test_a_context_without_a_user_is_anonymous(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c")

    assert await (await auth.connect(kubeconfig=str(path))).headers() == {}


def a_plugin(folder: Path, *, expires: str | None) -> dict:
    """An exec plugin that counts its runs and puts the count into the token."""
    script = folder / "plugin.py"
    status = {"token": "TOKEN"} | ({"expirationTimestamp": expires} if expires else {})
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": status,
    }
    script.write_text(
        f"""
import pathlib
runs = pathlib.Path({str(folder / "runs")!r})
count = int(runs.read_text()) + 1 if runs.exists() else 1
runs.write_text(str(count))
print({json.dumps(answer)!r}.replace("TOKEN", f"t{{count}}"))
"""
    )
    command = {"command": sys.executable, "args": [str(script)]}
    return {"exec": command | {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}}


@pytest.mark.parametrize(
    ("expires", "runs"), [(None, 1), ("2999-01-01T00:00:00Z", 1), ("2020-01-01T00:00:00Z", 2)]
)
async def test_a_plugin_is_run_again_only_when_its_token_has_ended(tmp_path, expires, runs):
    path = a_kubeconfig(tmp_path / "config", "c", user=a_plugin(tmp_path, expires=expires))
    connection = await auth.connect(kubeconfig=str(path), reread_s=0.0)
    assert (tmp_path / "runs").read_text() == "1"

    headers = await connection.headers()

    assert headers == {"Authorization": f"Bearer t{runs}"}
    assert (tmp_path / "runs").read_text() == str(runs)


async def test_a_plugin_is_run_again_when_the_server_refuses_and_then_not_for_each_request(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c", user=a_plugin(tmp_path, expires=None))
    connection = await auth.connect(kubeconfig=str(path))
    refused = await connection.headers()

    for _ in range(5):  # five requests under way were refused with the same token
        await connection.renew(refused)
    again = await connection.headers()
    await connection.renew(again)  # and the new one is refused too, at once

    assert again == {"Authorization": "Bearer t2"}
    assert (tmp_path / "runs").read_text() == "2"


async def test_a_plugin_that_fails_later_leaves_the_old_token_in_use(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c", user=a_plugin(tmp_path, expires="2020-01-01T00:00:00Z"))
    connection = await auth.connect(kubeconfig=str(path), reread_s=0.0)
    (tmp_path / "plugin.py").write_text("raise SystemExit('no network')")

    assert await connection.headers() == {"Authorization": "Bearer t1"}


async def test_a_plugin_that_fails_at_first_is_reported(tmp_path):
    user = a_plugin(tmp_path, expires=None)
    (tmp_path / "plugin.py").write_text("raise SystemExit('log in first')")

    with pytest.raises(auth.NoCluster, match="log in first"):
        await auth.connect(kubeconfig=str(a_kubeconfig(tmp_path / "config", "c", user=user)))


async def test_a_token_file_is_read_again_without_its_newline(tmp_path):
    token = tmp_path / "token"
    token.write_text("one\n")
    path = a_kubeconfig(tmp_path / "config", "c", user={"tokenFile": str(token)})
    connection = await auth.connect(kubeconfig=str(path), reread_s=0.0)
    token.write_text("two\n")

    assert await connection.headers() == {"Authorization": "Bearer two"}


async def test_a_kubeconfig_that_was_written_anew_is_read_after_a_refusal(tmp_path):
    path = a_kubeconfig(tmp_path / "config", "c", user={"token": "one"})
    connection = await auth.connect(kubeconfig=str(path))
    a_kubeconfig(path, "c", user={"token": "two"})

    await connection.renew(await connection.headers())

    assert await connection.headers() == {"Authorization": "Bearer two"}


@pytest.mark.parametrize(("excluded", "proxy"), [("", "http://proxy:3128"), ("127.0.0.1", None)])
async def test_the_proxy_of_the_environment_is_used_unless_excluded(monkeypatch, tmp_path, excluded, proxy):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", excluded)
    path = a_kubeconfig(tmp_path / "config", "c", user={})

    assert (await auth.connect(kubeconfig=str(path))).proxy == proxy
