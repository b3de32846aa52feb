"""A connection that nobody calls on stays: a server that took its keepalive for a flood would close it under the next call."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from transfer.registry.options import CHANNEL_OPTIONS, SERVER_OPTIONS

INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"
KEEPALIVE = "grpc.keepalive_time_ms"


async def lives(server_options: dict[str, int], channel_options: dict[str, int], *, for_s: float) -> bool:
    """Whether a connection without any call is still the same after `for_s`."""
    server = grpc.aio.server(options=list(server_options.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(channel_options.items()))
    try:
        await asyncio.wait_for(channel.channel_ready(), 20)
        try:
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), for_s)
        except TimeoutError:
            return True
        return False
    finally:
        await channel.close()
        await server.stop(None)


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_keepalive_is_no_flood(is_allowed: bool) -> None:
    """With both sides' own options, ten times as fast; and without the server's leave, to see that the test sees anything."""
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert server[INTERVAL] < channel[KEEPALIVE], "the server allows what our clients do, with room for a late one"
    server[INTERVAL] //= 10
    channel[KEEPALIVE] //= 10
    if not is_allowed:
        del server[INTERVAL]
    assert await lives(server, channel, for_s=5.0 if is_allowed else 30.0) is is_allowed
