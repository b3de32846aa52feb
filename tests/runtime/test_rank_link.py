"""The link between a leader and its ranks, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decode_node import rank_messages as decode_messages
from node_runtime.loop_thread import LoopThread
from node_runtime.rank_link import LeaderLink, RankAddress, RankCodec, RankLink, new_addresses
from prefill_node import rank_messages as prefill_messages
from tests.runtime.instances import instance, until
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.errors import LocalProtocolError
from transfer.instance import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    text: str
    number: int = 0


CODEC = RankCodec(Note)
LINK = Link(prefill_rank=1, decode_rank=0, lane="ucx/shm", latency_s=1e-6, bandwidth_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (prefill_messages.CODEC, prefill_messages.AttachDecode(join=3, instance=instance(7), rank_addresses=("a:1", "b:2"))),
        (
            decode_messages.CODEC,
            decode_messages.ExpectRequest(
                transfer_id="ä",
                prefill_incarnation=1,
                num_tokens=5,
                start_token=0,
                pages=(9, 2),
                host_pages=(3, 1),
                plan=ChunkPlan(chunk_tokens=128, layers_per_group=7),
                sampling=SamplingParams(temperature=0.5, seed=2**62),
            ),
        ),
    ],
)
def test_a_message_arrives_as_it_was(codec: RankCodec, message: object) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5000, b"\x92\xa1x\x80\x00"],
)
def test_bytes_that_are_no_message_of_the_link_are_refused(payload: bytes) -> None:
    with pytest.raises(LocalProtocolError, match=f"{len(payload)} bytes are not a message of a rank link"):
        prefill_messages.CODEC.decode(payload)


async def test_every_rank_hears_broadcasts_in_one_order_and_answers_under_its_own_number(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    leader = LeaderLink(new_addresses(tmp_path, 3), CODEC)
    heard: list[tuple[int, Any]] = []
    leader.watch(loop, lambda rank, message: heard.append((rank, message)))
    ranks = [RankLink(leader.addresses[rank], CODEC) for rank in range(3)]
    told: list[list[Any]] = [[], [], []]
    for rank, link in enumerate(ranks):
        link.watch(loop, told[rank].append)
        link.send(Note(text="hello", number=rank))
    await until(lambda: len(heard) == 3)
    assert sorted(rank for rank, _ in heard) == [0, 1, 2]
    assert all(message.number == rank for rank, message in heard)
    for number in range(50):
        assert leader.broadcast(Note(text="all", number=number))
        assert leader.send(number % 3, Note(text="one", number=number))
    await until(lambda: all(len(messages) >= 66 for messages in told))
    for messages in told:
        assert [message.number for message in messages if message.text == "all"] == list(range(50))
    assert [message.number for message in told[1] if message.text == "one"] == list(range(1, 50, 3))
    leader.close()
    for link in ranks:
        link.close()


async def test_ends_in_one_process_bypass_the_socket(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    leader = LeaderLink(new_addresses(tmp_path, 2), CODEC)
    heard: list[tuple[int, Any]] = []
    leader.watch(loop, lambda rank, message: heard.append((rank, message)))
    near, far = (RankLink(address, CODEC) for address in leader.addresses)
    told: list[list[Any]] = [[], []]
    for link, messages in zip((near, far), told, strict=True):
        link.watch(loop, messages.append)
        link.send(Note(text="hello"))
    await until(lambda: len(heard) == 2)
    leader.bypass_socket(0)
    sent = [Note(text="to all", number=number) for number in range(20)]
    for message in sent:
        assert leader.broadcast(message)
    assert not told[0], "a message is handled in a turn of its own, as one from the socket"
    await until(lambda: [len(messages) for messages in told] == [20, 20])
    assert all(message is one for message, one in zip(told[0], sent, strict=True)) and told[1] == sent
    answer = Note(text="near")
    near.send(answer)
    far.send(Note(text="far"))
    await until(lambda: len(heard) == 4)
    assert heard[2][0] == 0 and heard[2][1] is answer and heard[3] == (1, Note(text="far"))
    assert leader.send(0, Note(text="too late"))
    near.close()
    await asyncio.sleep(0)
    assert not leader.send(0, Note(text="nobody there")) and len(told[0]) == 20
    leader.close()
    far.close()


async def test_a_rank_on_another_loop_keeps_the_socket(tmp_path: Path) -> None:
    leader = LeaderLink(new_addresses(tmp_path, 1), CODEC)
    leader.watch(asyncio.get_running_loop(), lambda rank, message: None)
    told: list[Any] = []
    thread = LoopThread()
    rank = RankLink(leader.addresses[0], CODEC)
    thread.call(rank.watch, thread.loop, told.append)
    thread.call(rank.send, Note(text="hello"))
    message = Note(text="you")
    await until(lambda: leader.send(0, message))
    leader.bypass_socket(0)
    assert leader.send(0, message)
    await until(lambda: len(told) == 2)
    assert told == [message, message] and told[1] is not message
    thread.call(rank.close)
    thread.call(thread.loop.stop)
    leader.close()


async def test_a_stranger_is_not_heard_and_a_rank_that_is_not_there_takes_nothing(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    leader = LeaderLink(new_addresses(tmp_path, 2), CODEC)
    heard: list[Any] = []
    leader.watch(loop, lambda rank, message: heard.append((rank, message)))
    address = leader.addresses[0]
    stranger = RankLink(RankAddress(endpoint=address.endpoint, token=address.token % 2**62 + 1), CODEC)
    stranger.send(Note(text="let me in"))
    rank = RankLink(address, CODEC)
    rank.send(Note(text="it is me"))
    await until(lambda: bool(heard))
    await asyncio.sleep(0.05)
    assert heard == [(0, Note(text="it is me"))]
    assert leader.send(0, Note(text="you"))
    assert not leader.send(1, Note(text="nobody there")), "rank 1 has not connected"
    assert not leader.broadcast(Note(text="all")), "one of them is not there"
    leader.close()
    for link in (rank, stranger):
        link.close()
