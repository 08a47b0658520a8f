"""The one codec of a machine's identity: made here, parsed here, compared exactly.

Form: ``nb-<installation>-<claim UID>-<attempt>-<sequence>-<check>``, at most 60 of ``[a-z0-9-]``, so that it
fits as a name in every cloud. Whatever does not parse, check included, is not ours and is never touched.
"""

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from providers.base import ClaimUid

INSTALLATION_LENGTH = 10
_PART = re.compile(r"nb-([a-z2-7]{10})-([a-z]{2,12})-([0-9a-f]{16})", re.ASCII)
_FORM = re.compile(
    r"(nb-([a-z2-7]{10})-([a-z2-7]{26})-([1-9][0-9]{0,3})-([1-9][0-9]{0,8}))-([a-z2-7]{4})", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose machine it is: this installation's, for this claim, from this attempt."""

    installation: str
    claim_uid: ClaimUid
    attempt: int
    sequence: int

    def __str__(self) -> str:
        body = f"nb-{self.installation}-{_pack(self.claim_uid)}-{self.attempt}-{self.sequence}"
        return f"{body}-{_check(body)}"

    @property
    def token(self) -> str:
        """The client token of idempotent creates: as unique as the identity itself."""
        return str(self)


# Every list names every machine again: parsing was two thirds of what a round cost (18 us for each name).
@lru_cache(maxsize=16_384)
def parse(text: str | None) -> Identity | None:
    """The identity in a machine's name or tag; None for anything that this codec did not make."""
    match = _FORM.fullmatch(text) if text else None
    if match is None or _check(match[1]) != match[6]:
        return None
    claim_uid = _unpack(match[3])
    if claim_uid is None:
        return None
    return Identity(installation=match[2], claim_uid=claim_uid, attempt=int(match[4]), sequence=int(match[5]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPart:
    """A part that claims of one installation share (a registry login, a template), named by its content."""

    installation: str
    what: str
    digest: str

    def __str__(self) -> str:
        return f"nb-{self.installation}-{self.what}-{self.digest}"


def parse_part(text: str | None) -> SharedPart | None:
    """The name of a shared part; None for anything else, such as the marker that stands for an account."""
    match = _PART.fullmatch(text) if text else None
    return SharedPart(installation=match[1], what=match[2], digest=match[3]) if match else None


def new_installation() -> str:
    """Ten random base32 characters."""
    return base64.b32encode(secrets.token_bytes(7)).decode().lower()[:INSTALLATION_LENGTH]


def _pack(uid: str) -> str:
    return base64.b32encode(UUID(uid).bytes).decode().lower().rstrip("=")


def _unpack(text: str) -> ClaimUid | None:
    try:
        uid = ClaimUid(str(UUID(bytes=base64.b32decode(text.upper() + "======"))))
    except ValueError:
        return None
    return uid if _pack(uid) == text else None  # base32 has spare bits: only the canonical form counts


def _check(body: str) -> str:
    return base64.b32encode(hashlib.sha256(body.encode()).digest()).decode().lower()[:4]
