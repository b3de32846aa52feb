"""gRPC's own settings, for both sides: limits, keepalive, reconnecting."""

from __future__ import annotations

import resource
from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest request or response; a prompt of a million token ids has 5 MB."""

MAX_CONCURRENT_CALLS: Final = 8192
"""Calls in progress, open streams included, before gRPC answers RESOURCE_EXHAUSTED by itself. Each peer holds a stream."""

MAX_CLIENT_CALLS: Final = 3072
"""Calls of clients among them, health included. The rest belongs to the other tier, so that clients cannot block it."""

MAX_CONNECTIONS: Final = 4096
"""Connections of a server; further ones are closed at once."""

HANDSHAKE_MS: Final = 10_000
"""Time limit for the handshake of a new connection, TLS included. A stranger may connect and send nothing."""

MAX_PEERS: Final = 1024
"""Nodes of the other tier that a node joins, that join it, or that discovery names."""

MAX_SESSIONS: Final = 1024
"""Sessions of one rank: enough for 128 prefill nodes of 8 ranks that all write to one decode rank. A session takes up to 4.6 MiB
and 7 ms of the rank's loop (measured on two cores, with a UCX worker), so attaching strangers take at most 4.7 GiB."""

FILES_PER_SESSION: Final = 23
"""Open files of one session with the transport that needs most, `nixl` (docs/adr/0078-groups-of-prefill-nodes.md)."""

FILES_OF_A_RANK: Final = 256
"""Open files of a rank besides its sessions."""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # otherwise a second node on the same port starts silently, and takes half of the calls
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Heartbeats detect dead peers; keepalive only frees connections without heartbeats.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The library reads this name. The one in its documentation, with "recv" in it, has no effect.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

CHANNEL_OPTIONS: Final = (
    # Each channel has its own connection, so that one that hangs does not affect others to the same peer.
    ("grpc.use_local_subchannel_pool", 1),
    # Traffic inside a cluster never goes through a proxy for the internet.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # callers decide about retries
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time limit of one attempt to connect: on a busy machine, a loading rank can take longer than 0.1 s for a
    # handshake. A refused connection is still tried again after the initial back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def most_sessions(open_files: int) -> int:
    """Return the maximum of sessions with a limit of `open_files`. One more would fail half-way, and harm others."""
    if open_files == resource.RLIM_INFINITY:
        return MAX_SESSIONS
    return max(1, min(MAX_SESSIONS, (open_files - FILES_OF_A_RANK) // FILES_PER_SESSION))


def files_for(num_sessions: int) -> int:
    """Return the limit of open files that a rank with this number of sessions needs."""
    return FILES_OF_A_RANK + num_sessions * FILES_PER_SESSION


def limit_of_files(open_files: int) -> str:
    """Return why a rank takes no more sessions, for people: "it takes ... sessions with" this."""
    if most_sessions(open_files) == MAX_SESSIONS:
        return "any limit of open files"
    return f"its limit of {open_files} open files; {MAX_SESSIONS} sessions need {files_for(MAX_SESSIONS)} (ulimit -n)"


def most_connections(open_files: int) -> int:
    """Return the maximum of connections with a limit of `open_files`: strangers must not use up all files."""
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files // 4))
