"""gRPC's own settings, for both sides: limits, keepalive, reconnecting."""

from __future__ import annotations

import resource
from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest request or response; a prompt of a million token ids has 5 MB."""

MAX_CONCURRENT_CALLS: Final = 4096
"""Calls in progress before a server answers RESOURCE_EXHAUSTED by itself; streams count for as long as they live."""

MAX_CLIENT_CALLS: Final = 3072
"""Of those, calls that clients may make, health among them: what is left is the other tier's, whatever a client holds."""

MAX_CONNECTIONS: Final = 4096
"""Connections of a server; further ones are closed at once. No more calls than that can be in progress anyway."""

HANDSHAKE_MS: Final = 10_000
"""How long a new connection may take to come in, TLS included: it may be that of a stranger who says nothing."""

MAX_SESSIONS: Final = 256
"""Sessions of one rank. One takes 4.6 MiB and 7 ms of the rank's loop (seen on two cores), so strangers who attach cannot
take more than 1.2 GiB; 32 prefill nodes of 8 ranks that all write to one decode rank are served."""

FILES_PER_SESSION: Final = 20
"""Open files of one session: 14 of its UCX worker with two network devices and shared memory (two for each further device),
its gRPC and its ZeroMQ connection."""

FILES_OF_A_RANK: Final = 256
"""Open files that a rank has room for besides its sessions."""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # otherwise a second node on the same port starts without a word, and takes half of the calls
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Heartbeats find dead peers; keepalive only frees connections that nobody sends heartbeats on.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The name that the library reads; its documentation has one with "recv" in it, which does nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

CHANNEL_OPTIONS: Final = (
    # Each channel has a connection of its own: one that hangs must not take others to the same peer with it.
    ("grpc.use_local_subchannel_pool", 1),
    # A cluster's own traffic never goes through the proxy that somebody set for the internet.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # what may be repeated is decided above
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long one attempt to connect may take: a rank that loads, on a busy machine, can leave a handshake lying for longer
    # than 0.1 s. A refused connection is tried again after the initial back-off all the same.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def most_sessions(open_files: int) -> int:
    """Sessions that a rank takes with a limit of `open_files`: one too many would fail half-way, and take others along."""
    if open_files == resource.RLIM_INFINITY:
        return MAX_SESSIONS
    return max(1, min(MAX_SESSIONS, (open_files - FILES_OF_A_RANK) // FILES_PER_SESSION))


def most_connections(open_files: int) -> int:
    """Connections that a server takes with a limit of `open_files`: strangers can hold them, and must leave files to the rest."""
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files // 4))
