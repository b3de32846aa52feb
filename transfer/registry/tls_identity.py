"""Find the identity of the node at an address, before gRPC connects to it.

gRPC checks a server's certificate against one host name, and reports little about a refusal. Nodes are identified by the names of
their certificates instead, whatever their addresses are. So a separate TLS connection comes first, which finds the node's name or
the reason of the refusal. gRPC then accepts that name only.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, Final

from transfer.errors import PeerUnreachable
from transfer.peer_names import dns_name_of, first_match
from transfer.plain_text import host_of
from transfer.registry.certificates import Certificates, load_pair, names_of, reason_of, trust
from transfer.registry.connecting import address_of, connected, is_literal, text_of

HTTP2: Final = "h2"
_WRONG_HOST: Final = (62, 64)
"""OpenSSL's `X509_V_ERR_HOSTNAME_MISMATCH` and `X509_V_ERR_IP_ADDRESS_MISMATCH`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """The node that answered.

    Args:
        target: Its address and port, without any name.
        name: Name that gRPC checks the certificate for; None means the host of `target`.
        authorities: PEM certificates that gRPC trusts.
    """

    target: str
    name: str | None
    authorities: bytes


async def greet(address: str, own: Certificates, *, allowed: tuple[str, ...], timeout_s: float) -> Greeted:
    """Connect to host:port, and check the certificate.

    Args:
        own: Certificates that this side shows and trusts.
        allowed: Names that the other side may have; empty means only the host of `address`.
        timeout_s: For the whole call.

    Raises:
        PeerUnreachable: Nothing answers, the name is not allowed, or one side does not accept the other.
    """
    host = host_of(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = not allowed
    trust(context, own.authorities, "tls.ca_file")
    load_pair(context, own.chain, own.key)
    context.set_alpn_protocols([HTTP2])
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await connected(address)
            reader, writer = await asyncio.open_connection(sock=connection, ssl=context, server_hostname=host)
            # With TLS 1.3 a server judges this side's certificate after the handshake; one that accepts it speaks first.
            if not await reader.read(1):
                raise ConnectionResetError
    except TimeoutError:
        raise PeerUnreachable(f"{address}: no answer within {timeout_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise PeerUnreachable(f"{address}: its certificate is refused: {_why_refused(error)}") from None
    except ssl.SSLError as error:
        raise PeerUnreachable(f"{address}: {_why_no_tls(error)}") from None
    except (ConnectionResetError, BrokenPipeError):
        raise PeerUnreachable(
            f"{address}: it ended the connection in the TLS handshake; a node does so that does not accept this side's "
            "certificate (tls.cert_file): expired, or from an authority that its tls.ca_file does not have; or that has as many "
            "connections as it takes"
        ) from None
    except OSError as error:
        raise PeerUnreachable(f"{address}: {text_of(error)}") from None
    finally:
        found = None if writer is None else _found(writer)
        if writer is not None:
            writer.transport.abort()
    assert found is not None
    return _judged(address, found, own, allowed)


def _why_refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_HOST:  # the authority is trusted; without tls.peer_names, the host must match
        return f"{error.verify_message.rstrip('.')}; give the name that it has to have in tls.peer_names (--peer-name)"
    return f"{error.verify_message} (tls.ca_file)"


def _found(writer: asyncio.StreamWriter) -> tuple[dict[str, Any], bytes, tuple[Any, ...]]:
    connection = writer.get_extra_info("ssl_object")
    return connection.getpeercert(), connection.getpeercert(binary_form=True), writer.get_extra_info("peername")


def _judged(
    address: str, found: tuple[dict[str, Any], bytes, tuple[Any, ...]], own: Certificates, allowed: tuple[str, ...]
) -> Greeted:
    certificate, encoded, peer = found
    target = address_of(peer)
    names = names_of(certificate)
    if not allowed:
        host = host_of(address)
        return Greeted(target=target, name=None if is_literal(host) else host, authorities=own.authorities)
    name = first_match(allowed, names)
    if name is None:
        raise PeerUnreachable(f"{address}: {names} answers there, which is not in tls.peer_names (--peer-name) of this side")
    if "://" not in name:
        return Greeted(target=target, name=name, authorities=own.authorities)
    # gRPC checks no URIs. So it must accept exactly this certificate, which has been checked.
    checked = dns_name_of(names.dns)
    if checked is None:
        raise PeerUnreachable(f"{address}: the certificate of {names} has no DNS name, which gRPC checks a server by")
    return Greeted(target=target, name=checked, authorities=ssl.DER_cert_to_PEM_cert(encoded).encode())


def _why_no_tls(error: ssl.SSLError) -> str:
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "what answers there does not speak TLS (a node with --insecure?)"
    return f"the TLS handshake failed: {reason_of(error)}"
