"""What a decode rank does for each request, without an engine."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decode_node import worker as worker_module
from decode_node.admission import page_needs
from decode_node.rank_messages import ExpectRequest, RequestExpected
from decode_node.receiver_events import IncomingRequest, IncomingRoute
from decode_node.worker import DecodeWorker, _Writer
from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.config import DecodeNodeConfig
from transfer.engine_types import SamplingParams
from transfer.errors import ChunkTooLarge, LayoutError, StagingError
from transfer.instance import AttachRequest
from transfer.layer_groups import layer_groups
from transfer.layout import DType, routes
from transfer.page_allocator import GroupAllocator
from transfer.registry.options import MAX_SESSIONS
from transfer.staging import StagingBuffer
from transfer.transport.inproc import InprocHub, InprocTransport

PREFILL_LIFE = 11
PLAN = ChunkPlan(chunk_tokens=4)
SCALES = {(0, False): 0.5}


def test_the_routes_of_a_prefill_instance_are_not_computed_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    own, prefill = instance(22), instance(PREFILL_LIFE, tp_size=2)
    rank = SimpleNamespace(_instance=own, _spec=SimpleNamespace(rank=0))
    mine = DecodeWorker._routes_from(cast(DecodeWorker, rank), prefill)
    assert mine == tuple(routes(own.layout, prefill.shard, own.shard)) and {route.prefill_rank for route in mine} == {0, 1}
    writers = {
        50 + number: _Writer(
            instance=prefill,
            rank=number,
            routes=mine,
            lane="inproc",
            digest="kvferry-words-64",
            scales=SCALES,
        )
        for number in range(2)
    }
    said: list[Any] = []
    expected: list[IncomingRequest] = []
    rank = SimpleNamespace(
        _instance=own,
        _spec=SimpleNamespace(rank=0),
        _writers=writers,
        _requests={},
        _allocator=GroupAllocator(page_needs(layer_groups(own.layout), 4), (8,)),
        _receiver=SimpleNamespace(is_known=lambda name: False, expect_request=expected.append),
        _link=SimpleNamespace(send=said.append),
        _wire=lambda instance: DType.FLOAT16,
    )

    def not_again(*args: Any) -> None:
        raise AssertionError("routes() depends on the instances alone, and takes long for wide ones")

    monkeypatch.setattr(worker_module, "routes", not_again)
    message = ExpectRequest(
        request_id="a",
        prefill_incarnation=PREFILL_LIFE,
        num_tokens=3,
        start_token=0,
        reserved_tokens=5,
        plan=PLAN,
        sampling=SamplingParams(),
    )
    DecodeWorker._expect(cast(DecodeWorker, rank), message)
    assert said == [RequestExpected(request_id="a")]
    assert expected[0].plan is PLAN
    assert expected[0].digest == "kvferry-words-64" and expected[0].scales is SCALES
    assert expected[0].routes == tuple(IncomingRoute(route=route, session=50 + route.prefill_rank) for route in mine)


async def test_an_attach_that_does_not_fit_names_the_sides_as_the_prefill_node_does() -> None:
    """And it is offered nothing."""
    transport = SimpleNamespace(accept=lambda *_: pytest.fail("the ring was offered"))
    rank = SimpleNamespace(_instance=instance(22, weights="decode's"), _transport=transport)
    request = SimpleNamespace(prefill=instance(PREFILL_LIFE, weights="prefill's"))
    with pytest.raises(LayoutError, match="prefill != decode: model weights: prefill's != decode's"):
        await DecodeWorker._on_attach(cast(DecodeWorker, rank), cast(Any, request))


async def test_an_attach_whose_chunks_are_above_the_ring_is_offered_nothing() -> None:
    rank = SimpleNamespace(
        _instance=instance(22),
        _spec=SimpleNamespace(rank=0),
        _transport=SimpleNamespace(accept=lambda *_: pytest.fail("the ring was offered")),
        _receiver=SimpleNamespace(ring=SimpleNamespace(capacity_bytes=256)),
    )
    for name in ("_routes_from", "_wire"):
        setattr(rank, name, getattr(DecodeWorker, name).__get__(rank))
    request = SimpleNamespace(prefill=instance(PREFILL_LIFE), prefill_rank=0, chunk_plan=PLAN)
    with pytest.raises(ChunkTooLarge, match=r"ring\.capacity_bytes is 256"):
        await DecodeWorker._on_attach(cast(DecodeWorker, rank), cast(Any, request))


async def test_writers_that_come_and_go_and_let_go_of_nothing_are_attached_no_more() -> None:
    """What closed sessions hold of the system, where nothing can take a writer's mapping of the ring back, has a limit too."""
    rank = SimpleNamespace(
        _instance=instance(22),
        _spec=SimpleNamespace(rank=0),
        _transport=SimpleNamespace(accept=lambda *_: pytest.fail("the ring was offered")),
        _receiver=SimpleNamespace(ring=SimpleNamespace(capacity_bytes=1 << 16), num_ending=MAX_SESSIONS),
    )
    for name in ("_routes_from", "_wire"):
        setattr(rank, name, getattr(DecodeWorker, name).__get__(rank))
    request = SimpleNamespace(prefill=instance(PREFILL_LIFE), prefill_rank=0, chunk_plan=PLAN)
    with pytest.raises(StagingError, match=r"256 sessions of decode rank 0 are closed, and their writers may still write"):
        await DecodeWorker._on_attach(cast(DecodeWorker, rank), cast(Any, request))


async def test_a_session_that_is_closed_as_soon_as_it_is_attached_harms_nobody() -> None:
    own, prefill = instance(22), instance(PREFILL_LIFE)
    hub = InprocHub()
    transport = InprocTransport(hub, one_sided=True)
    memory = transport.register(StagingBuffer(num_bytes=1 << 16).tensor)
    kept: list[Coroutine[Any, Any, None]] = []
    rank = SimpleNamespace(
        _instance=own,
        _spec=SimpleNamespace(rank=0),
        _config=DecodeNodeConfig(model=Path("unused")),
        _engine=SimpleNamespace(pool=SimpleNamespace(device=torch.device("cpu"))),
        _transport=transport,
        _writers={},
        _receiver=SimpleNamespace(
            ring=SimpleNamespace(capacity_bytes=1 << 16),
            num_ending=0,
            memory=memory,
            copier=None,
            driver=SimpleNamespace(add=lambda session: None),
            open_session=lambda number, session, incarnation, control_key: None,
        ),
        _control=SimpleNamespace(address="inproc", public_key=bytes(32)),
        _keep=kept.append,
        _crash=pytest.fail,
    )
    for name in ("_routes_from", "_wire", "_warm_up"):
        setattr(rank, name, getattr(DecodeWorker, name).__get__(rank))
    request = AttachRequest(
        prefill=prefill,
        prefill_rank=0,
        offer=InprocTransport(hub, one_sided=True).offer().blob,
        chunk_plan=PLAN,
        probe_bytes=1 << 12,
        control_key=bytes(32),
    )
    answer = await DecodeWorker._on_attach(cast(DecodeWorker, rank), request)
    del rank._writers[answer.session_id]
    (warm_up,) = kept
    await warm_up  # an error that nobody awaits would end the rank
