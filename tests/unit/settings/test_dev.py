"""``--dev`` brings what is not named, and is not misled by what it has told a shell before."""

from pathlib import Path

from app.dev import bring_up
from app.settings import Settings, entries_text, load, parse_providers


def test_what_an_earlier_start_told_the_shell_to_export_is_made_anew(tmp_path: Path):
    with bring_up(Settings(dev=True, dev_dir=str(tmp_path), database_url="postgresql://mine/db")) as first:
        told = entries_text(first.providers)

    again = load(
        {"dev": True, "dev_dir": str(tmp_path), "providers": told, "database_url": "postgresql://mine/db"}, {}
    )
    with bring_up(again) as second:
        assert entries_text(second.providers) != told
        assert second.database_url == "postgresql://mine/db"
        assert second.kubelet_address == "127.0.0.1"


def test_a_cloud_of_ones_own_is_used(tmp_path: Path):
    own = parse_providers("mine=fake,url=http://127.0.0.1:1")

    with bring_up(
        Settings(dev=True, dev_dir=str(tmp_path), database_url="postgresql://mine/db", providers=own)
    ) as made:
        assert made.providers == own


def test_the_entries_are_read_back_as_they_were():
    text = "modal=fake,url=http://127.0.0.1:1,token_env=T aws/spare=aws"

    assert entries_text(parse_providers(text)) == text
