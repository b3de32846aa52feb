"""How a process serves and calls over gRPC: with mutual TLS, or in plain text if its settings say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import grpc

from transfer.config import ProcessConfig, TlsConfig
from transfer.errors import ConfigError
from transfer.plain_text import ON_LOOPBACK, check_plain_text, is_plain_text_right, why_not_plain_text
from transfer.registry.certificates import CertificateFiles, Certificates, certificate_files, tier_certificate_files
from transfer.registry.guard import CallerRole

SETTLE_S: Final = 0.25
"""Time after which a handshake that asked has its reference, which its thread takes in its next step."""

MAX_AGE_S: Final = 10.0
"""Longest time that handshakes without a pause share a context, and that a ticket is valid."""


class Renewal:
    """Decide whether a handshake of a server needs a new TLS context. One call at a time, because gRPC holds a lock.

    gRPC asks before each handshake for the content of the certificate files. An answer replaces the context of later handshakes,
    and frees the previous context when nothing uses it. Both extremes are dangerous:

    - A context that is never replaced is shared, and its session tickets are valid. A caller with a ticket is not asked for a
      certificate again, and its certificate can have expired since.
    - gRPC 1.85 asks under a lock, and takes a reference to the context after it has released the lock
      (`grpc_ssl_server_security_connector::add_handshakers`). If the next handshake, on another thread, replaces the context in
      between, the context is freed and then used. Hundreds of connections at once, which anyone can open without a certificate,
      ended the process (SIGSEGV or SIGABRT in four runs of six on two cores).

    So a context is replaced only when no handshake has asked for `SETTLE_S`. Every handshake that asked before has its
    reference by then, and none can ask meanwhile, because the lock is held.

    Args:
        clock: Seconds that never go back.
        sleep: Waits so many seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._asked_s = float("-inf")
        self._renewed_s = float("-inf")
        self._content: object = None

    def is_due(self, content: object) -> bool:
        """Return whether to replace the context before this handshake, which waits for the answer; wait until that is safe.

        Args:
            content: Content of the certificate files; a change makes a renewal due.
        """
        now_s = self._clock()
        settled_s = self._asked_s + SETTLE_S
        if now_s < settled_s:
            if content == self._content and now_s - self._renewed_s < MAX_AGE_S:
                self._asked_s = now_s
                return False
            self._sleep(settled_s - now_s)
        self._asked_s = self._renewed_s = self._clock()
        self._content = content
        return True


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

        Only handshakes that come at once share a TLS context (`Renewal`). So a session ticket is valid for seconds at most: a
        caller that resumes a session is not asked for a certificate again.
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
