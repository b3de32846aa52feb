"""The wait for the prefill node that a prompt names."""

from __future__ import annotations

import asyncio
from typing import Final

from transfer.config.values import checked_host_port
from transfer.connector.attempt import WantedPrompt
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import LayoutError, PeerUnreachable, TransferAborted

REJOIN_S: Final = 5.0
"""Limit of the wait for a node that had the prompt to join again. It joins again within moments, or has died with the prompt."""


async def named_node(prompt: WantedPrompt, peers: PrefillNodes, *, may_join: bool) -> PrefillPeer:
    """Return the prefill node that the prompt names, once it is joined.

    Raises:
        TransferAborted: This side does not use that node, or the prompt was lost with the node's last life.
        LayoutError: The node does not fit, for example because it has another model.
        PeerUnreachable: The node does not join in time.
    """
    peer = peers.find(prompt.source)
    if peer is None:
        if not may_join:
            raise TransferAborted(
                f"the prompt's prefill node is {prompt.source}, which is not in peers.prefill_nodes; it must be one of them "
                "(join_on_request allows others)"
            )
        try:
            peer = peers.add(checked_host_port(prompt.source))
        except ValueError as error:  # a ConfigError is one, too
            raise TransferAborted(f"the prompt's prefill node is {prompt.source!r:.300}: {error}") from error
    wait_s = min(REJOIN_S, prompt.join_timeout_s) if prompt.life else prompt.join_timeout_s
    waiting = [asyncio.ensure_future(event.wait()) for event in (peer.joined, peer.unfit)]
    peer.num_users += 1
    try:
        await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        peer.num_users -= 1
        for event in waiting:
            event.cancel()
    if not peer.joined.is_set():
        kind = LayoutError if peer.unfit.is_set() else PeerUnreachable
        raise kind(f"prefill node {peer.address} is {peer.state}: {peer.reason}")
    peer = peer.other or peer
    assert peer.instance is not None, "it is joined"
    if prompt.engine_request and prompt.life not in (0, peer.instance.incarnation):
        raise TransferAborted(f"prefill node {peer.address} restarted and lost the KV of its engine")
    return peer
