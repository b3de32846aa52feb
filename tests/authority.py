"""Certificates for tests: own authorities, and valid or invalid certificates that they sign."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from transfer.config import TlsConfig
from transfer.registry.certificates import CertificateFiles
from transfer.registry.security import MutualTls

BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Certificate files of one side."""

    folder: Path

    @property
    def cert(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def tls(self, **settings: Any) -> TlsConfig:
        return TlsConfig(cert_file=self.cert, key_file=self.key, ca_file=self.ca, **settings)

    def settings(self, *, peers: str, clients: str) -> dict[str, object]:
        """Return a node's settings by path, which let callers with these names in."""
        return {
            "tls.cert_file": self.cert,
            "tls.key_file": self.key,
            "tls.ca_file": self.ca,
            "tls.peer_names": peers,
            "tls.client_names": clients,
        }

    def security(self, *peer_names: str) -> MutualTls:
        """Return the credentials of a caller with these files."""
        return MutualTls(files=CertificateFiles(self.tls(), is_server=False), peer_names=peer_names)

    def put(self, *, cert: bytes | None = None, key: bytes | None = None, ca: bytes | None = None) -> None:
        """Replace files, each in one step; None leaves one as it is."""
        for path, content in ((self.cert, cert), (self.key, key), (self.ca, ca)):
            if content is not None:
                new = path.with_suffix(".new")
                new.touch(mode=0o600)
                new.write_bytes(content)
                new.replace(path)


class Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        made = trustme.CA()
        self.pem = made.cert_pem.bytes()
        self._certificate = x509.load_pem_x509_certificate(self.pem)
        self._key: Any = load_pem_private_key(made.private_key_pem.bytes(), None)

    def issue(
        self,
        *names: str,
        days: float = 1.0,
        from_days: float = -1.0,
        purposes: tuple[x509.ObjectIdentifier, ...] = BOTH,
    ) -> tuple[bytes, bytes]:
        """PEM certificate and key; names with :// are URIs, names of digits are addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=from_days))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private

    def files(self, folder: Path, *names: str, **how: Any) -> Files:
        """A folder with a fresh certificate, its key and this authority."""
        folder.mkdir(parents=True, exist_ok=True)
        files = Files(folder=folder)
        cert, key = self.issue(*names, **how)
        files.put(cert=cert, key=key, ca=self.pem)
        return files


def age(files: Files, seconds: float = 60.0) -> None:
    """Make the files look as if they had been written that long ago."""
    for path in (files.cert, files.key, files.ca):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - int(seconds * 1e9)))


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    if name.replace(".", "").isdigit():
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)
