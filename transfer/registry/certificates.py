"""The certificate of this process, its key and the authorities that it trusts: files that are read again when they change.

A TLS handshake of the process with itself, in memory, finds errors in them before another process meets them.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from transfer.config import DecodeNodeConfig, NodeConfig, ProcessConfig, TlsConfig
from transfer.errors import ConfigError
from transfer.peer_names import SubjectNames

RACY_S: Final = 2.0
"""A file that was read within this time after a change can change again unnoticed, because file times are coarse."""

_BAD_PURPOSE: Final = 26  # OpenSSL's X509_V_ERR_INVALID_PURPOSE

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The content of the files, checked together.

    Args:
        chain: PEM certificate of this process and the intermediate ones.
        key: PEM private key.
        authorities: PEM certificates.
        names: Names of the first certificate.
        not_after_s: Time at which that certificate expires, in seconds since 1970.
    """

    chain: bytes
    key: bytes
    authorities: bytes
    names: SubjectNames
    not_after_s: float


class CertificateFiles:
    """Read the three files of `TlsConfig`. Any thread may call it.

    Args:
        tls: Names the files.
        is_server: Whether others connect to this process.

    Raises:
        ConfigError: The files cannot be used; one line names the file and the reason.
    """

    def __init__(self, tls: TlsConfig, *, is_server: bool) -> None:
        assert tls.cert_file is not None and tls.key_file is not None and tls.ca_file is not None
        self._cert, self._key, self._ca = tls.cert_file, tls.key_file, tls.ca_file
        self._is_server = is_server
        self._lock = threading.Lock()
        self._seen = self._signs()
        self.problem = ""
        """Why older content is used instead of the present one; empty if the present one is used."""
        self._current: Certificates | None = None
        self._current = self._load()

    def current(self) -> Certificates:
        """Return the content of the files; while it cannot be used, the content before."""
        with self._lock:
            assert self._current is not None
            try:
                signs = self._signs()
                if signs == self._seen and not _is_racy(signs):
                    return self._current
                self._seen = signs
                loaded = self._load()
            except ConfigError as error:
                if str(error) != self.problem:
                    log.error("certificate_not_reloaded", reason=str(error))
                self.problem = str(error)
                return self._current
            self.problem = ""
            if loaded != self._current:
                self._current = loaded
                log.info("certificate_reloaded", names=str(loaded.names), not_after=_date(loaded.not_after_s))
            return self._current

    def _signs(self) -> tuple[tuple[int, ...], ...]:
        """Return values that change when a file does."""
        return tuple(
            (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev, found.st_mode)
            for found in map(_stat, self._settings())
        )

    def _settings(self) -> tuple[tuple[str, Path], ...]:
        return ("tls.cert_file", self._cert), ("tls.key_file", self._key), ("tls.ca_file", self._ca)

    def _load(self) -> Certificates:
        mode = stat.S_IMODE(_stat(("tls.key_file", self._key)).st_mode)
        if mode & 0o006:
            raise ConfigError(
                f"tls.key_file is {self._key}, which all users of this machine can read or write (mode {mode:03o}); chmod o-rw it"
            )
        chain, key, authorities = (_read(setting) for setting in self._settings())
        last = self._current
        if last is not None and (chain, key, authorities) == (last.chain, last.key, last.authorities):
            return last
        own, names, not_after_s = self._try(chain, key, authorities)
        if self._is_server and not own:
            raise ConfigError(
                f"tls.cert_file is {self._cert}, which has no DNS name (subject alternative name); callers check a node by one"
            )
        return Certificates(chain=chain, key=key, authorities=authorities, names=names, not_after_s=not_after_s)

    def _try(self, chain: bytes, key: bytes, authorities: bytes) -> tuple[bool, SubjectNames, float]:
        """Make a handshake of the files with themselves. Return whether there is a DNS name, the names, and the expiry."""
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        client.check_hostname = False
        client.verify_mode = ssl.CERT_REQUIRED if self._is_server else ssl.CERT_NONE
        for context in (server, client):
            trust(context, authorities, f"tls.ca_file is {self._ca}")
            try:
                load_pair(context, chain, key)
            except ssl.SSLError as error:
                raise ConfigError(self._why_no_pair(chain, error)) from None
        try:
            certificate = _peer_certificate(server, client)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(self._why_untrusted(error)) from None
        except ssl.SSLError as error:
            raise ConfigError(f"tls.cert_file is {self._cert}, which cannot be used: {reason_of(error)}") from None
        names = names_of(certificate)
        return bool(names.dns), names, float(ssl.cert_time_to_seconds(certificate["notAfter"]))

    def _why_no_pair(self, chain: bytes, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"tls.key_file is {self._key}, which is not the key of the certificate in tls.cert_file, {self._cert}"
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=chain.decode("ascii", "backslashreplace"))
        except (ssl.SSLError, ValueError):
            return f"tls.cert_file is {self._cert}, which contains no PEM certificate"
        return f"tls.key_file is {self._key}, which holds no PEM private key without a passphrase"

    def _why_untrusted(self, error: ssl.SSLCertVerificationError) -> str:
        which = f"tls.cert_file is {self._cert}"
        if error.verify_code == _BAD_PURPOSE:
            needs = "server and client authentication" if self._is_server else "client authentication"
            return f"{which}, whose extended key usage does not allow {needs}"
        return f"{which}, which is not accepted with tls.ca_file {self._ca}: {error.verify_message}"


def certificate_files(config: ProcessConfig) -> CertificateFiles | None:
    """Return the files that the settings of a process name; None if they name none.

    Raises:
        ConfigError: They cannot be used, or the settings allow no caller.
    """
    tls = config.tls
    if not tls.is_set_up:
        return None
    if not isinstance(config, NodeConfig):
        return CertificateFiles(tls, is_server=False)
    is_decode = isinstance(config, DecodeNodeConfig)
    if is_decode and tls.peer_names and not tls.client_names:
        raise ConfigError(
            "tls.client_names is empty; it must have the names of the certificates that may generate (--client-name)"
        )
    return tier_certificate_files(tls, other_tier="prefill" if is_decode else "decode")


def tier_certificate_files(tls: TlsConfig, *, other_tier: Literal["prefill", "decode"]) -> CertificateFiles:
    """Return the files of a process that serves the other tier, and calls it.

    Raises:
        ConfigError: They cannot be used, or no caller would be allowed.
    """
    if not tls.peer_names:
        raise ConfigError(
            f"tls.peer_names is empty; it must have the names of the {other_tier} nodes' certificates (--peer-name)"
        )
    return CertificateFiles(tls, is_server=True)


def trust(context: ssl.SSLContext, authorities: bytes, what: str) -> None:
    """Let a context accept certificates that these authorities signed.

    Raises:
        ConfigError: They are no PEM certificates; the line begins with `what`.
    """
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", "backslashreplace"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{what}, which contains no PEM certificate") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC has it: an intermediate authority may be trusted by itself


def load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load these bytes into a context, not the present content of the files; ssl reads from files only.

    Raises:
        ssl.SSLError: Certificate and key do not belong together, or are none.
    """
    with _memory_file(chain) as chain_path, _memory_file(key) as key_path:
        context.load_cert_chain(chain_path, key_path, password=lambda: b"")  # else it would ask a terminal for a passphrase


def names_of(certificate: dict[str, Any]) -> SubjectNames:
    """Return the names in the result of `ssl.SSLObject.getpeercert()`."""
    found = certificate.get("subjectAltName", ())
    return SubjectNames(
        dns=tuple(name for kind, name in found if kind == "DNS"), uris=tuple(name for kind, name in found if kind == "URI")
    )


def reason_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's own words, in one line."""
    return (error.reason or str(error)).replace("_", " ").lower()


def _peer_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Return the client's certificate as the server sees it, after a handshake of the two."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="self"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    waiting = set(ends)
    for _ in range(8):  # each end waits for the other at most three times
        for end in ends:
            if end in waiting:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    waiting.discard(end)
    certificate = ends[1].getpeercert() if not waiting else None
    if certificate is None:
        raise ssl.SSLError("the handshake does not end")
    return certificate


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("kvferry-tls")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _stat(setting: tuple[str, Path]) -> os.stat_result:
    name, path = setting
    try:
        return os.stat(path)
    except OSError as error:
        raise ConfigError(f"{name} is {path}, which cannot be read: {error.strerror}") from error


def _read(setting: tuple[str, Path]) -> bytes:
    name, path = setting
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} is {path}, which cannot be read: {error.strerror}") from error


def _is_racy(signs: tuple[tuple[int, ...], ...]) -> bool:
    return max(sign[0] for sign in signs) > time.time_ns() - RACY_S * 1e9


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
