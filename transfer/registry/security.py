"""How a process serves and calls over gRPC: with mutual TLS, or in plain text if its settings say so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import grpc

from transfer.config import ProcessConfig, TlsConfig
from transfer.errors import ConfigError
from transfer.plain_text import ON_LOOPBACK, check_plain_text, is_plain_text_right, why_not_plain_text
from transfer.registry.certificates import CertificateFiles, Certificates, certificate_files, tier_certificate_files
from transfer.registry.renewal import Renewal
from transfer.registry.roles import CallerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """No TLS: neither side knows the identity of the other.

    Args:
        insecure: As `tls.insecure`.
    """

    insecure: int = ON_LOOPBACK

    def check(self, what: str, address: str) -> None:
        """Raises:
        ConfigError: Plain text may not be used with that address.
        """
        problem = why_not_plain_text(what, address, self.insecure)
        if problem is not None:
            raise ConfigError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """TLS in which both sides show a certificate.

    Args:
        files: The files of this side.
        peer_names: Names of the nodes that it connects to, and that may call it as peers. Empty for a command that only calls:
            the certificate must then have the host that it calls.
        client_names: Names of callers that may call it as clients.
    """

    files: CertificateFiles
    peer_names: tuple[str, ...]
    client_names: tuple[str, ...] = ()

    def check(self, what: str, address: str) -> None:
        """Accept any address: the certificate decides."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that read the newest files for each connection.

        Only handshakes that come at once share a TLS context (`transfer.registry.renewal`). So a session ticket is valid for
        seconds at most: a caller that resumes a session is not asked for a certificate again.
        """
        renewal = Renewal()

        def newest() -> grpc.ServerCertificateConfiguration | None:  # on a thread of gRPC's, before each handshake
            files = self.files.current()
            return _configuration(files) if renewal.is_due(files) else None

        first = _configuration(self.files.current())
        # None stands for no change, which the stubs do not know.
        return grpc.dynamic_ssl_server_credentials(first, newest, require_client_authentication=True)  # type: ignore[arg-type]

    @property
    def names(self) -> dict[CallerRole, tuple[str, ...]]:
        """Allow-list of each role, for a server with these credentials."""
        return {CallerRole.PEER: self.peer_names, CallerRole.CLIENT: self.client_names}


Security = PlainText | MutualTls


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.authorities)


def security_of(config: ProcessConfig) -> Security:
    """Return the security that the settings of a process ask for.

    Raises:
        ConfigError: They name neither TLS nor plain text, the files cannot be used, or no caller would be allowed.
    """
    check_plain_text(config)
    files = certificate_files(config)
    if files is None:
        return PlainText(insecure=config.tls.insecure)
    return MutualTls(files=files, peer_names=config.tls.peer_names, client_names=config.tls.client_names)


def security_of_tier(
    tls: TlsConfig, *, other_tier: Literal["prefill", "decode"], named: Iterable[tuple[str, str | None]]
) -> Security:
    """Return the security that the settings of one tier inside an engine, which is no node, ask for.

    Args:
        other_tier: The tier that it serves and calls.
        named: Addresses that it listens on and connects to: name, for example of its setting, and host or host:port.

    Raises:
        ConfigError: They name neither TLS nor plain text, the files cannot be used, or no caller would be allowed.
    """
    if is_plain_text_right(tls, named):
        return PlainText(insecure=tls.insecure)
    files = tier_certificate_files(tls, other_tier=other_tier)
    return MutualTls(files=files, peer_names=tls.peer_names, client_names=tls.client_names)
