"""A prefill leader: channels to decode leaders, requests and their calls, drains, and the size of steps."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from node_runtime.rank_messages import StepFailed
from prefill_node.node import PrefillNode
from prefill_node.rank_messages import CODEC, PrefillStepPart, RunPrefillStep, check_step_fits
from tests.decode.leader_world import turns
from tests.decode.local_nodes import LocalContext
from tests.prefill.conftest import DAEMON, Leader
from tests.runtime.instances import prefill_config
from transfer import chunk as chunk_module
from transfer.connector.outgoing import Transfer
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.errors import ConfigError, EngineError, PeerUnreachable, TransferAborted
from transfer.metrics import MetricsPage
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.peer_channel import PeerChannel

NOWHERE = "127.0.0.1:1"
REFUSED = re.compile(r'kvferry_requests_total\{outcome="refused",role="prefill"\} 1(\.0)?\n')


async def test_the_channel_to_a_decode_leader_ends_with_its_last_join(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = PeerChannel.close

    async def noted(channel: PeerChannel) -> None:
        await close(channel)
        closed.append(channel.address)

    monkeypatch.setattr(PeerChannel, "close", noted)
    joins = [await leader.joined(number, NOWHERE) for number in (1, 2)]
    with pytest.raises(PeerUnreachable):
        await leader.node.reserving.reserve(joins[0], "a", joins[0].plan, prefill_incarnation=1)
    leader.joins.leave(joins[0], PeerUnreachable("it left"))
    assert leader.node.reserving.addresses == (NOWHERE,), "the other join has that address as well"
    leader.joins.leave(joins[1], PeerUnreachable("it left"))
    assert leader.node.reserving.addresses == ()
    await leader.node.reserving.close()
    assert closed == [NOWHERE]


async def test_the_end_of_a_call_gives_up_its_own_request_and_not_the_next_of_that_id(leader: Leader) -> None:
    join, following = await leader.joined(1), list[Transfer]()

    async def abort(*details: Any, **values: Any) -> None:
        following.append(Transfer(transfer_id="a", token_ids=(1, 2), join=join, plan=join.plan))
        leader.requests.submit(following[0])
        raise RuntimeError("the call is over")

    reading = leader.prefill(SimpleNamespace(abort=abort, invocation_metadata=tuple))
    await turns()
    assert leader.requests.request_ids == ("a",)
    assert leader.requests.abort("a", TransferAborted("by an operator"))
    await asyncio.gather(reading, return_exceptions=True)
    assert following and not following[0].is_over
    assert leader.requests.request_ids == ("a",)


async def test_a_call_gives_its_request_up_when_its_caller_leaves(leader: Leader) -> None:
    await leader.joined(1)
    reading = leader.prefill()
    await turns()
    assert leader.requests.request_ids == ("a",)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert leader.requests.num_transfers == 0
    page = MetricsPage().render(leader.node.metrics.collect([]))[0].decode()
    assert 'kvferry_queue_seconds_count{role="prefill"} 1.0' in page, "it has waited, and found no room"


async def test_a_salt_goes_with_its_request(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    await leader.joined(1)
    submit, salts = leader.requests.submit, list[str]()

    def noted(transfer: Transfer) -> None:
        salts.append(transfer.cache_salt)
        submit(transfer)

    monkeypatch.setattr(leader.requests, "submit", noted)
    reading = leader.prefill(cache_salt="é" * 128)
    await turns()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert salts == ["é" * 128]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"decode_incarnation": 999}, "decode instance 0x00000000000003e7 has not joined"),
        ({"token_ids": ()}, "prompt is empty"),
        ({"cache_salt": "t" * 129}, "cache_salt has 129 characters; it can have at most 128"),
    ],
)
async def test_a_prompt_that_is_not_queued_counts_as_refused(leader: Leader, fields: dict[str, Any], complaint: str) -> None:
    await leader.joined(1)
    with pytest.raises(grpc.aio.AioRpcError, match=complaint):
        await leader.prefill(**fields)
    assert leader.requests.num_transfers == 0
    assert REFUSED.search(MetricsPage().render(leader.node.metrics.collect([]))[0].decode())


async def test_a_prompt_of_too_many_pieces_is_refused_before_it_is_queued(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leader.joined(1)
    monkeypatch.setattr(chunk_module, "MAX_PIECES", 0)
    with pytest.raises(grpc.aio.AioRpcError, match=r"2 tokens .* layers are 2 chunks; a request on 1 routes can have 0"):
        await leader.prefill()
    assert leader.requests.num_transfers == 0


async def test_a_node_that_drains_takes_neither_prompts_nor_joins(leader: Leader) -> None:
    await leader.joined(1)
    await leader.node.drain()
    with pytest.raises(grpc.aio.AioRpcError, match="the prefill node is draining"):
        await leader.prefill()
    with pytest.raises(grpc.aio.AioRpcError, match="the prefill node is draining"):
        await anext(aiter(leader.node.Join(pb.JoinRequest(), cast(Any, LocalContext()))))


@pytest.mark.parametrize("is_fatal", [True, False])
async def test_a_group_that_broke_ends_its_requests_as_unreachable_and_one_failed_step_its_own(
    leader: Leader, is_fatal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    monkeypatch.setattr(leader.node, "lose", lost.append)
    join = await leader.joined(1)
    request = Transfer(transfer_id="a", token_ids=(1, 2), join=join, plan=join.plan)
    leader.requests.submit(request)
    failed = StepFailed(step=1, request_ids=("a",), reason="connection closed by peer", is_fatal=is_fatal)
    leader.node.ranks.on_message(0, failed)
    assert lost == (["rank 0: connection closed by peer"] if is_fatal else [])
    assert request.is_over is not is_fatal
    await leader.node.end_life(PeerUnreachable("rank 1 died"))
    error = request.progress.get_nowait()
    assert isinstance(error, PeerUnreachable if is_fatal else EngineError)


def test_a_step_larger_than_a_message_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = prefill_config(tmp_path, limits={"max_step_tokens": 300_000})
    with pytest.raises(ConfigError, match=r"limits.max_step_tokens is \d+, .* takes 1048576; lower them"):
        PrefillNode(DAEMON, config)


def test_the_largest_step_that_is_allowed_fits_its_message(tmp_path: Path) -> None:
    limits = {"max_running_requests": 1000, "max_step_tokens": 81_000}
    check_step_fits(prefill_config(tmp_path, limits=limits))
    parts = tuple(
        PrefillStepPart(request_id=f"{part:\U0001f600>128}", token_ids=(2**32 - 1,) * 81, first_token=2**31, is_last=False)
        for part in range(1000)
    )
    assert len(CODEC.encode(RunPrefillStep(step=2**62, parts=parts))) <= MAX_PAYLOAD_BYTES
