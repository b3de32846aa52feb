"""gRPC's own settings, for both sides: limits, keepalive, reconnecting."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest request or response; a prompt of a million token ids has 5 MB."""

MAX_CONCURRENT_CALLS: Final = 4096
"""Calls in progress before a server answers RESOURCE_EXHAUSTED by itself; streams count for as long as they live."""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # otherwise a second node on the same port starts without a word, and takes half of the calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Beats find dead peers; keepalive only frees connections that nobody beats on.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
