"""Keys of machines: the same again from the same secret and identity, and from nothing else."""

import asyncssh
import pytest

from app.machines.keys import access, private_key

SECRET = b"s" * 32
MACHINE = "nb-abcdefghij-klmnop-1-1-x"


def test_the_private_key_is_that_of_the_public_one_and_is_made_again_at_any_time():
    handed = access(SECRET, MACHINE)
    assert handed is not None

    own = asyncssh.import_private_key(private_key(SECRET, MACHINE))

    assert own.export_public_key().split()[:2] == handed.ssh_public_key.encode().split()[:2]
    assert access(SECRET, MACHINE) == handed
    assert handed.host_key != private_key(SECRET, MACHINE)


@pytest.mark.parametrize(("secret", "machine"), [(b"t" * 32, MACHINE), (SECRET, MACHINE + "y")])
def test_another_secret_or_machine_has_another_key(secret: bytes, machine: str):
    assert private_key(secret, machine) != private_key(SECRET, MACHINE)


def test_without_a_secret_there_is_no_key_and_a_key_is_never_shown():
    assert access(b"", MACHINE) is None
    assert "PRIVATE" not in repr(access(SECRET, MACHINE))
