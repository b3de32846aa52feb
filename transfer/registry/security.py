"""How a process is spoken to and speaks over gRPC: with mutual TLS, or in plain text where it was told to."""

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
    """No TLS: nobody knows who the other side is.

    Args:
        insecure: As `tls.insecure`.
    """

    insecure: int = ON_LOOPBACK

    def check(self, what: str, address: str) -> None:
        """Raises:
        ConfigError: That address may not be spoken to in plain text.
        """
        problem = why_not_plain_text(what, address, self.insecure)
        if problem is not None:
            raise ConfigError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """TLS in which both sides show a certificate.

    Args:
        files: This side's.
        peer_names: Whom it connects to, and who may call it as a peer; of a command that only calls, empty: the host it calls.
        client_names: Who may call it as a client.
    """

    files: CertificateFiles
    peer_names: tuple[str, ...]
    client_names: tuple[str, ...] = ()

    def check(self, what: str, address: str) -> None:
        """Any address will do: it is the certificate that counts."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server; each connection has the newest files.

        TLS contexts are shared by handshakes that come at once and by no others (`transfer.registry.renewal`), so that a session
        ticket is good for seconds at most: who resumes a session is not asked for a certificate again.
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
    """What the settings say.

    Raises:
        ConfigError: They say neither, the files cannot be used, or nobody would be let in.
    """
    check_plain_text(config)
    files = certificate_files(config)
    if files is None:
        return PlainText(insecure=config.tls.insecure)
    return MutualTls(files=files, peer_names=config.tls.peer_names, client_names=config.tls.client_names)


def security_of_tier(
    tls: TlsConfig, *, other_tier: Literal["prefill", "decode"], named: Iterable[tuple[str, str | None]]
) -> Security:
    """What the settings say to a process that is one tier inside an engine, and no node.

    Args:
        other_tier: Whom it serves and calls.
        named: What it listens on and connects to: name, for example of its setting, and host or host:port.

    Raises:
        ConfigError: They say neither, the files cannot be used, or nobody would be let in.
    """
    if is_plain_text_right(tls, named):
        return PlainText(insecure=tls.insecure)
    files = tier_certificate_files(tls, other_tier=other_tier)
    return MutualTls(files=files, peer_names=tls.peer_names, client_names=tls.client_names)
