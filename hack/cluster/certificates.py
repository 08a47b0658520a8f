"""Certificates of one local control plane: a CA of its own and the leaves that its parts show each other."""

import base64
import ipaddress
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FRONT_PROXY_NAME = "front-proxy-client"
NODE_NAME = "local"  # of the one machine that a kubelet may be started for
SERVICE_RANGE = "10.96.0.0/16"

_VALID = timedelta(days=3650)  # a state folder may be used for long
_SLACK = timedelta(hours=1)  # for a clock that lags


def write_all(folder: Path) -> None:
    """Write ``ca``, ``apiserver``, ``admin``, ``node``, ``kubelet-client``, ``front-proxy`` (.crt, .key) and
    ``sa.key``.

    ``ca.crt`` is written last: where it exists the set is whole, and is kept.
    """
    if (folder / "ca.crt").exists():
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    authority = _Authority()
    first_address = next(ipaddress.IPv4Network(SERVICE_RANGE).hosts())
    names: list[x509.GeneralName] = [
        *(x509.DNSName(name) for name in ("localhost", "kubernetes", "kubernetes.default.svc")),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(first_address),
    ]
    authority.leaf(folder, "apiserver", common_name="kube-apiserver", names=names)
    authority.leaf(folder, "admin", common_name="admin", group="system:masters")
    authority.leaf(
        folder, "kubelet-client", common_name="kube-apiserver-kubelet-client", group="system:masters"
    )
    authority.leaf(folder, "node", common_name=f"system:node:{NODE_NAME}", group="system:nodes")
    authority.leaf(folder, "front-proxy", common_name=FRONT_PROXY_NAME)
    signer = ec.generate_private_key(ec.SECP256R1())
    _write(folder / "sa.key", _pem(signer))
    public = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(folder / "sa.pub", signer.public_key().public_bytes(*public))
    _write(folder / "ca.key", _pem(authority.key))
    _write(folder / "ca.crt", authority.certificate.public_bytes(serialization.Encoding.PEM))


def write_kubeconfig(path: Path, *, server: str, folder: Path, user: str = "admin") -> None:
    """Write a kubeconfig for ``server`` (a URL), certificates embedded, readable by us alone.

    ``user`` is one of the leaves that `write_all` makes.
    """

    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "local", "cluster": {"server": server, "certificate-authority-data": encoded("ca.crt")}}
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": encoded(f"{user}.crt"),
                    "client-key-data": encoded(f"{user}.key"),
                },
            }
        ],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": user}}],
        "current-context": "local",
    }
    _write(path, json.dumps(config, indent=2).encode())  # JSON is YAML


class _Authority:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nebula local cluster")])
        self.certificate = (
            self._builder(self._name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def leaf(
        self,
        folder: Path,
        file: str,
        *,
        common_name: str,
        group: str | None = None,
        names: Sequence[x509.GeneralName] = (),
    ) -> None:
        """Write a certificate: a server's if it has ``names``, else a client's, in ``group`` if given."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            subject.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            self._builder(x509.Name(subject), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        _write(folder / f"{file}.key", _pem(key))
        _write(folder / f"{file}.crt", certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SLACK)
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
