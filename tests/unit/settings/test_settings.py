"""Options: checked at once, every error listed with the name that the person used."""

import pytest
from click.testing import CliRunner

from app.cli import main
from app.settings import FAST, Settings, SettingsError, load, parse_providers


def test_all_errors_are_listed_at_once_by_flag_or_variable():
    with pytest.raises(SettingsError) as caught:
        load(
            {"providers": "Bad!", "webhook_url": "http://x"},
            {"NEBULA_LEASE_RENEW_S": "soon", "NEBULA_DATABSE_URL": "x", "HOME": "/"},
        )

    text = str(caught.value)
    assert len(caught.value.errors) == 4
    for name in (
        "--providers",
        "--webhook-url",
        "NEBULA_LEASE_RENEW_S",
        "NEBULA_DATABSE_URL: no such option; did you mean NEBULA_DATABASE_URL?",
    ):
        assert name in text


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_profile():
    env = {"NEBULA_PROFILE": "fast", "NEBULA_UNBOUND_AFTER_S": "7", "NEBULA_STALE_RETRY_S": "2"}

    settings = load({"stale_retry_s": "3"}, env)

    assert (settings.stale_retry_s, settings.unbound_after_s) == (3.0, 7.0)
    assert settings.lease_duration_s == FAST["lease_duration_s"]


def test_an_error_never_shows_a_secret():
    with pytest.raises(SettingsError) as caught:
        load({"database_url": "mysql://user:hunter2@host/db"}, {})

    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(load({"database_url": "postgresql://user:hunter2@host/db"}, {}))


@pytest.mark.behaviour(386)
def test_one_provider_named_as_earlier_installations_do():
    earlier = {"GPU_BURST_PROVIDER": "runpod"}

    assert [entry.adapter for entry in load({}, earlier).providers] == ["runpod"]
    both = load({}, earlier | {"NEBULA_PROVIDERS": "modal=fake"})
    assert [entry.name for entry in both.providers] == ["modal"]
    assert load({}, {"GPU_BURST_PROVIDER": "fake"}).providers == ()
    assert load({}, {"GPU_BURST_PROVIDER": ""}).providers == ()
    with pytest.raises(SettingsError, match="GPU_BURST_PROVIDER"):
        load({}, {"GPU_BURST_PROVIDER": "run pod=?"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("send_window_s", 31),
        ("send_window_s", 0),
        ("settle_after_s", 0),
        ("lease_renew_s", 0),
        ("list_busy_s", -1),
    ],
)
def test_a_duration_outside_its_bounds_is_refused(field: str, value: float):
    with pytest.raises(SettingsError):
        load({field: value}, {})


def test_the_lease_must_outlast_its_deadline():
    with pytest.raises(SettingsError, match="lease-renew-s < lease-deadline-s < lease-duration-s"):
        load({"lease_deadline_s": 20}, {})


@pytest.mark.behaviour(223)
def test_the_defaults_are_those_that_real_clouds_need():
    settings = Settings()

    assert (settings.backoff_base_s, settings.backoff_max_s) == (1.0, 60.0)
    assert (settings.send_window_s, settings.unknown_timeout_floor_s) == (30.0, 60.0)
    assert (settings.lease_duration_s, settings.lease_deadline_s, settings.lease_renew_s) == (15.0, 10.0, 2.0)
    assert settings.settle_after_s is None  # the adapter's own
    assert (settings.list_busy_s, settings.list_rest_s) == (1.0, 15.0)
    assert (settings.block_jitter_s, settings.unbound_after_s) == (30.0, 120.0)


def test_providers_are_read_with_account_adapter_and_options():
    one, two = parse_providers("modal=fake,url=http://127.0.0.1:1,token_env=T aws/spare")

    assert (one.key, one.adapter, dict(one.options)) == (
        ("modal", "default"),
        "fake",
        {"url": "http://127.0.0.1:1", "token_env": "T"},
    )
    assert (two.key, two.adapter) == (("aws", "spare"), "aws")


@pytest.mark.parametrize("text", ["a a", "a/b a/b", "A", "a=", "a=fake,url", "a,b"])
def test_providers_of_another_form_are_refused(text: str):
    with pytest.raises(ValueError, match=r"is not NAME|named twice"):
        parse_providers(text)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run"], "--database-url: required"),
        (["run", "--providers", "x=nosuch"], "no adapter 'nosuch'; installed: fake"),
        (["run", "--providers", "x=fke"], "no adapter 'fke' (did you mean fake?)"),
        (["run", "--catalog-dir", "/nowhere"], "/nowhere: cannot be listed"),
        (["run", "--no-such-option"], "No such option"),
        (["run", "--log-level", "loud"], "--log-level"),
    ],
)
def test_the_command_refuses_to_start_and_says_why(args: list[str], says: str):
    result = CliRunner(env={"NEBULA_DATABASE_URL": None, "NEBULA_PROVIDERS": None}).invoke(main, args)

    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.behaviour(358)
def test_a_broken_catalogue_keeps_a_replica_from_starting_with_every_error(tmp_path):
    (tmp_path / "fake.csv").write_text("accelerator_type,capacity_type,machine_usd\nH100,spot,0\n")
    env = {"NEBULA_CATALOG_DIR": str(tmp_path), "NEBULA_DATABASE_URL": "postgresql://a@b/c"}

    result = CliRunner(env=env).invoke(main, ["run", "--providers", "fake"])

    assert result.exit_code == 2
    assert "fake.csv:2: capacity_type: 'spot' is not one of Spot, OnDemand" in result.output
    assert "fake.csv:2: machine_usd: nothing costs 0 dollars" in result.output


def test_user_and_password_of_a_secret_take_their_place_in_the_urls_whatever_they_hold():
    settings = load(
        {},
        {
            "NEBULA_DATABASE_URL": "postgresql://db.example:5432/nebula?sslmode=require",
            "NEBULA_DIRECT_DATABASE_URL": "postgresql://old:word@direct.example/nebula",
            "NEBULA_DATABASE_USER": "us/er",
            "NEBULA_DATABASE_PASSWORD": "p@ss:w/rd%",
        },
    )

    login = "us%2Fer:p%40ss%3Aw%2Frd%25"
    assert settings.database_url == f"postgresql://{login}@db.example:5432/nebula?sslmode=require"
    assert settings.direct_database_url == f"postgresql://{login}@direct.example/nebula"
    assert "p@ss" not in repr(settings)


def test_a_password_alone_leaves_the_user_of_the_url():
    given = {"NEBULA_DATABASE_URL": "postgresql://me@db/nebula", "NEBULA_DATABASE_PASSWORD": "x"}

    assert load({}, given).database_url == "postgresql://me:x@db/nebula"


def test_a_misspelt_variable_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match="did you mean NEBULA_DATABASE_URL"):
        load({}, {"NEBULA_DATABSE_URL": "x"})


def test_dev_is_refused_inside_a_cluster():
    result = CliRunner(env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).invoke(main, ["run", "--dev"])

    assert result.exit_code == 2
    assert "--dev: never in a cluster" in result.output


def test_every_option_of_a_replica_is_in_its_help():
    result = CliRunner().invoke(main, ["run", "--help"])

    assert result.exit_code == 0
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in result.output


@pytest.mark.behaviour(271)
@pytest.mark.parametrize("address", ["kubelet.example", "10.0.0", "10.0.0.1:10250"])
def test_the_endpoints_address_is_an_ip_address(address: str):
    with pytest.raises(SettingsError, match="must be an IP address"):
        load({"kubelet_address": address}, {})


def test_an_empty_address_turns_the_endpoint_off():
    assert load({}, {"NEBULA_KUBELET_ADDRESS": ""}).kubelet_address is None
    assert load({}, {"NEBULA_KUBELET_ADDRESS": "[fd00::1]"}).kubelet_address == "fd00::1"


@pytest.mark.parametrize(("dead_man_s", "fits"), [("0", True), ("600", True), ("599", False)])
def test_a_machines_own_limit_is_far_above_the_times_in_which_we_notice_that_we_are_away(dead_man_s, fits):
    if fits:
        assert load({"dead_man_s": dead_man_s}, {}).dead_man_s == float(dead_man_s)
    else:
        with pytest.raises(SettingsError, match="at least 600"):
            load({"dead_man_s": dead_man_s}, {})
