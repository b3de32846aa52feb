"""A one-sided probe lands by itself: it may come at any time, and must not touch what other writers have in the ring."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.runtime.instances import until
from tests.runtime.scattered_tiers import ScatteredTiers
from tests.runtime.test_pool_to_pool import LAYOUT, settled
from transfer.layout import Shard
from transfer.pool.staging import StagingBuffer
from transfer.receive.loop import ReceiverLoop
from transfer.transport.driver import SessionDriver
from transfer.transport.probe import ProbePlan, probe_link

PROBE_BYTES = 4096
RING_BYTES = 1 << 13


class WithPlaceForProbes(ReceiverLoop):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values, probe_bytes=PROBE_BYTES)
        self.held = values["ring_memory"].tensor


async def test_requests_arrive_whole_while_another_writer_probes_its_link() -> None:
    tiers = ScatteredTiers(
        LAYOUT,
        Shard(page_size=16),
        Shard(page_size=8),
        is_one_sided=True,
        ring_bytes=RING_BYTES + PROBE_BYTES,
        receiver_type=WithPlaceForProbes,
    )
    (sender,), (receiver,) = tiers.senders, tiers.receivers
    assert receiver.loop.ring.capacity_bytes == RING_BYTES
    offer = sender.transport.offer()
    target, answer = receiver.transport.accept(offer.blob, receiver.loop.memory)
    writer = offer.complete(answer)
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(writer)
    scratch = StagingBuffer(num_bytes=PROBE_BYTES)
    scratch.tensor.fill_(0xA5)
    memory = sender.transport.register(scratch.tensor)
    plan = ProbePlan.fitting(PROBE_BYTES, target_begin=receiver.loop.ring.capacity_bytes)
    num_probes = 0

    async def probe_again_and_again() -> None:
        nonlocal num_probes
        while True:
            await probe_link(driver, writer, memory, plan=plan)
            num_probes += 1

    probing = asyncio.ensure_future(probe_again_and_again())
    names = [f"r{number}" for number in range(6)]
    for name in names:
        tiers.start(name, 60)
        await tiers.compute(name, 60)
        await until(lambda: name in receiver.complete and name in sender.sent)  # noqa: B023
        tiers.assert_arrived(name, 60)
    await until(lambda: num_probes)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    assert receiver.loop.ring.position > 3 * RING_BYTES, "the ring has come round, and ends where it should"
    assert all(sender.sent[name].resends == 0 for name in names)
    assert isinstance(receiver.loop, WithPlaceForProbes)
    held = receiver.loop.held
    assert (held[RING_BYTES:] == 0xA5).all() and not (held[:RING_BYTES] == 0xA5).all()
    driver.remove(writer)
    writer.close()
    target.close()
    await settled(tiers)
    tiers.close()
