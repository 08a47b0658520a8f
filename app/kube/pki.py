"""Minting of the webhook's certificates: EC P-256, PEM in and out, no I/O and no clock of its own.

Certificates begin an hour before ``now``, because the clocks of replicas and API servers differ.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATED = timedelta(hours=1)
CA_NAME = "nebula-ca"
ORGANISATION = "nebula"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:  # the key must reach no log
        return f"Pair({fingerprints(self.certificate)})"


def mint_ca(*, now: datetime, life: timedelta) -> Pair:
    """A new certificate authority that may sign leaves only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANISATION),
            x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME),
        ]
    )
    builder = (
        _begun(key, subject=name, issuer=name, now=now, until=now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, by=key)


def mint_leaf(ca: Pair, *, names: Sequence[str], now: datetime, life: timedelta) -> Pair:
    """A serving certificate for ``names`` (DNS names and IP addresses), never outliving ``ca``."""
    authority = x509.load_pem_x509_certificate(ca.certificate)
    signer = _private_key(ca.key)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    until = min(now + life, authority.not_valid_after_utc)
    builder = (
        _begun(key, subject=subject, issuer=authority.subject, now=now, until=until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    return _signed(builder, key, by=signer)


def belongs(pair: Pair) -> bool:
    """Whether both parts can be read and the key is the certificate's."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError):
        return False
    return certificate.public_key() == key.public_key()


def signed_by(certificate: bytes, ca: bytes) -> bool:
    """Whether ``ca`` signed ``certificate`` (the first one in the text)."""
    try:
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(
            x509.load_pem_x509_certificate(ca)
        )
    except Exception:  # InvalidSignature, ValueError and TypeError all mean no
        return False
    return True


def names(certificate: bytes) -> set[str]:
    """The DNS names and IP addresses that a certificate is for."""
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        alternatives = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    dns = alternatives.get_values_for_type(x509.DNSName)
    return {*dns, *(str(address) for address in alternatives.get_values_for_type(x509.IPAddress))}


def begun(certificate: bytes) -> datetime:
    """When a certificate of ours was minted."""
    return x509.load_pem_x509_certificate(certificate).not_valid_before_utc + BACKDATED


def ends(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def due(certificate: bytes) -> datetime:
    """When to renew: after two thirds of its life."""
    start = begun(certificate)
    return start + (ends(certificate) - start) * 2 / 3


def split(bundle: bytes) -> list[bytes]:
    """The certificates of a PEM bundle, each as PEM; empty when it cannot be read."""
    try:
        return [_pem(certificate) for certificate in x509.load_pem_x509_certificates(bundle)]
    except ValueError:
        return []


def bundle(certificates: Iterable[bytes], *, now: datetime) -> bytes:
    """One PEM text of the certificates that have not ended, each once, in order."""
    return b"".join(dict.fromkeys(_normal(one) for one in certificates if ends(one) > now))


def fingerprints(bundle_text: bytes) -> set[str]:
    """The SHA-256 of each certificate of a bundle: two bundles trust the same when these are equal."""
    try:
        certificates = x509.load_pem_x509_certificates(bundle_text)
    except ValueError:
        return set()
    return {certificate.fingerprint(hashes.SHA256()).hex() for certificate in certificates}


def _begun(
    key: ec.EllipticCurvePrivateKey, *, subject: x509.Name, issuer: x509.Name, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, *, by: ec.EllipticCurvePrivateKey
) -> Pair:
    key_text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(_pem(builder.sign(by, hashes.SHA256())), key_text)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_key(text: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(text, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not a key of ours")
    return key


def _normal(certificate: bytes) -> bytes:
    return _pem(x509.load_pem_x509_certificate(certificate))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
