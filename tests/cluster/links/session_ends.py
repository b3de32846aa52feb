"""Either end of a session in a process of its own.

``python -m tests.cluster.links.session_ends writer ADDRESS`` prints "alive" with each ack, and
``python -m tests.cluster.links.session_ends rank [CLOSE_S]`` its address. With `CLOSE_S`, it closes the session after so many
seconds. Both print "lost" and the reason at the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tests.registry.attaches import attach_request, attach_response, serving
from transfer.instance import AttachRequest, AttachResponse
from transfer.registry.client import SessionWatch, TransferControlClient
from transfer.registry.server import RegistryServer, TransferControlServicer
from transfer.ring import Watermark

HEARTBEAT_S = 0.5
RING_BYTES = 4096
CLOSED = "closed on purpose"


def rank(on_lost: Callable[[str], None], close_s: float | None = None) -> AbstractAsyncContextManager[RegistryServer]:
    async def attach(_: AttachRequest) -> AttachResponse:
        if close_s is not None:
            asyncio.get_running_loop().call_later(close_s, lambda: servicer.close_session(77, CLOSED))
        return attach_response(ring_capacity_bytes=RING_BYTES, heartbeat_s=HEARTBEAT_S)

    servicer = TransferControlServicer(
        watermark=Watermark(incarnation=9, sequence=1, position=0),
        ring_capacity_bytes=RING_BYTES,
        heartbeat_s=HEARTBEAT_S,
        on_attach=attach,
        on_session_lost=lambda _, reason: on_lost(reason),
    )
    return serving(transfer_control=servicer)


async def attached(
    address: str, on_watermark: Callable[[Watermark], None], on_lost: Callable[[str], None]
) -> tuple[TransferControlClient, SessionWatch]:
    client = TransferControlClient(address)
    answer = await client.attach(attach_request(), timeout_s=20)
    watch = client.watch(
        answer.session_id,
        ring_capacity_bytes=answer.ring_capacity_bytes,
        heartbeat_s=answer.heartbeat_s,
        on_watermark=on_watermark,
        on_lost=on_lost,
    )
    return client, watch


async def main(role: str, argument: str | None = None) -> None:
    def say(text: str) -> None:
        print(text, flush=True)

    def lost(reason: str) -> None:
        say(f"lost {reason}")

    if role == "writer":
        assert argument is not None
        _ends = await attached(argument, lambda _: say("alive"), lost)
        await asyncio.sleep(60)
    else:
        async with rank(lost, None if argument is None else float(argument)) as server:
            say(server.address)
            await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
