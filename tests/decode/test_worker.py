"""What a decode rank does with a request that it is told to expect, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_node.admission import page_needs
from decode_node.attach import Unattached, WritersOfInstance
from decode_node.rank_messages import ExpectRequest, RequestExpected
from decode_node.receiver_events import IncomingRequest, IncomingRoute
from decode_node.worker import DecodeWorker
from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.layer_groups import layer_groups
from transfer.layout import DType, routes
from transfer.page_allocator import GroupAllocator

PREFILL_LIFE = 11
PLAN = ChunkPlan(chunk_tokens=4)
OWN = instance(22)
WRITERS = WritersOfInstance(
    wire_dtype=DType.FLOAT16,
    routes=tuple(
        IncomingRoute(route=route, session=50 + route.prefill_rank)
        for route in routes(OWN.layout, instance(PREFILL_LIFE, tp_size=2).shard, OWN.shard)
    ),
    digest="kvferry-words-64",
    scales={(0, False): 0.5},
)


class Rank:
    """A worker that expects one request; `writers` and `is_known` are what its sessions and its receiver say."""

    def __init__(self, writers: WritersOfInstance | Unattached, *, is_known: bool = False) -> None:
        self.said: list[Any] = []
        self.expected: list[IncomingRequest] = []
        asked: list[int] = []
        self.worker = SimpleNamespace(
            _instance=OWN,
            _offload=None,
            _requests={},
            _allocator=GroupAllocator(page_needs(layer_groups(OWN.layout), 4), (8,)),
            _sessions=SimpleNamespace(writers_of=lambda incarnation: asked.append(incarnation) or writers),
            _receiver=SimpleNamespace(is_known=lambda name: is_known, expect_request=self.expected.append),
            _link=SimpleNamespace(send=self.said.append),
        )
        message = ExpectRequest(
            request_id="a",
            prefill_incarnation=PREFILL_LIFE,
            num_tokens=3,
            start_token=0,
            pages=(2,),
            plan=PLAN,
            sampling=SamplingParams(),
        )
        DecodeWorker._expect(cast(DecodeWorker, self.worker), message)
        assert asked == [PREFILL_LIFE]


def test_a_request_is_received_from_its_writers_sessions() -> None:
    rank = Rank(WRITERS)
    assert rank.said == [RequestExpected(request_id="a")]
    (expected,) = rank.expected
    assert expected.plan is PLAN and expected.layout is OWN.layout and expected.num_tokens == 3
    assert expected.wire_dtype is WRITERS.wire_dtype and expected.routes is WRITERS.routes
    assert expected.digest is WRITERS.digest and expected.scales is WRITERS.scales
    assert rank.worker._requests["a"].is_receiving


@pytest.mark.parametrize(
    ("writers", "is_known", "reason"),
    [
        (Unattached(reason="prefill rank 1 is not attached"), False, "prefill rank 1 is not attached"),
        (WRITERS, True, "an earlier request of the same id is still draining"),
    ],
)
def test_a_request_that_cannot_be_received_says_why_and_asks_for_nothing(
    writers: WritersOfInstance | Unattached, is_known: bool, reason: str
) -> None:
    rank = Rank(writers, is_known=is_known)
    assert rank.said == [RequestExpected(request_id="a", reason=reason)] and not rank.expected
    assert not rank.worker._requests["a"].is_receiving, "its pages go back as soon as the leader says so"
