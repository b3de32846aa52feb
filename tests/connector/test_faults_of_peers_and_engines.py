"""A connector survives dishonest peers, early ends and repeated reports, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
from threading import Event
from typing import Any

import grpc
import pytest

from kvferry.engines.connector import PREFILL
from node_runtime.rank_link import rank_socket_address
from tests.connector.conftest import Pair, Start
from tests.connector.instances import PROMPT, TIMEOUT_S, Instance, hand_over, wait_for
from transfer.connector import offered_prompts as source_prompts
from transfer.connector import prefill_nodes as peers_module
from transfer.connector.prefill_peer import PrefillPeer
from transfer.copy.piece_copier import PieceCopy
from transfer.errors import LocalProtocolError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc

# Messages of peers


async def ask_again(source: Instance, decode: Instance, request_id: str) -> str:
    """Abort an attempt, and send a request with the same id at once; return the error."""
    request = pb.PrefillRequest(
        request_id=request_id,
        engine_request="t",
        token_ids=PROMPT,
        decode_incarnation=decode.leader.incarnation,
        sampling=pb.SamplingParams(top_p=1.0),
    )
    async with grpc.aio.insecure_channel(source.leader.address) as channel:
        stub: Any = pb_grpc.PrefillControlStub(channel)
        assert (await stub.Abort(pb.AbortRequest(request_id=request_id, reason="try again"))).found
        try:
            async for event in stub.Prefill(request):
                raise AssertionError(f"the attempt was accepted: {event}")
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
    return ""


def test_reuse_of_the_id_of_a_running_attempt_is_rejected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the sender reported a bug of its own process, which ended the engine."""
    source, decode = pair()
    gather = PieceCopy.gather
    is_held, let_go = Event(), Event()

    def held_gather(piece: PieceCopy, *args: Any) -> None:
        is_held.set()
        assert let_go.wait(TIMEOUT_S)
        gather(piece, *args)

    async def unreachable(peer: PrefillPeer) -> object:
        raise PeerUnreachable("the network is cut")

    monkeypatch.setattr(PieceCopy, "gather", held_gather)
    decode.fetches("b", "t", source)
    source.computes("a", "t", end=64)
    assert is_held.wait(TIMEOUT_S), "a gather is under way"
    (request_id,) = source.leader.outgoing.requests.request_ids
    with monkeypatch.context() as cut:
        cut.setattr(PrefillPeer, "stub", unreachable)  # so that the decode side cannot report first that it gave up the prompt
        error = asyncio.run(ask_again(source, decode, request_id))
    assert "is in flight already" in error
    let_go.set()
    source.leader.withdraw("a", "enough")
    for rank in source.ranks:
        rank.finish("a")
    source.freed("a")
    decode.settled("b")
    hand_over(source, decode, "next")


def test_a_note_above_the_limit_fails_only_its_own_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a note above the limit of the link to the ranks ended the decode side's engine."""
    source, decode = pair()
    monkeypatch.setattr(source_prompts, "MAX_NOTE_BYTES", 8 << 20)
    for name, num_bytes, message in (("largest", 1 << 20, ""), ("larger", (1 << 20) + 1, "it can have 1048576")):
        source.computes(name, name)
        source.finish(name, note=bytes(num_bytes))
        decode.fetches(name, name, source, needs_note=True)
        settled = decode.settled(name)
        assert message in settled.failure and bool(settled.failure) is bool(message)
        assert len(settled.note) == (0 if message else num_bytes)
        source.leader.withdraw(name, "enough")
        source.freed(name)
    hand_over(source, decode, "next")


def test_requests_add_only_a_bounded_number_of_prefill_nodes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the decode side joined each node, or retried it forever."""
    monkeypatch.setattr(peers_module, "MAX_ADDED", 3)
    source, decode = pair(None, {"join_on_request": True, "limits.meet_timeout_s": 0.1})
    peers = decode.leader.incoming.nodes
    for index in range(1, 8):
        name = f"n{index}"
        decode.leader.want(name, name, f"127.0.0.1:{index}", PROMPT)
        assert f"prefill node 127.0.0.1:{index} is" in decode.wait_until_failed(name)
        decode.leader.cancel(name, "computed here")
        assert len(peers.peers) <= 4
    for address in ("unix:/tmp/socket:1", "127.0.0.1", "[::1]:70000", "\n:1", "x" * 5000):
        decode.leader.want("odd", "odd", address, PROMPT)
        assert "it must be" in decode.wait_until_failed("odd") or "127.0.0.1" not in address
        decode.leader.cancel("odd", "computed here")
        wait_for(lambda: decode.leader.view("odd") is None, "forgotten")
    hand_over(source, decode, "next")
    assert sum(peer.is_added for peer in peers.peers) <= 3


# Calls of the engine


def test_a_prompt_that_ends_early_fails_its_transfer(pair: Pair) -> None:
    """Regression: the transfer and the decode side waited forever for the rest, and the decode side kept its pages."""
    source, decode = pair({"tp_size": 2})
    decode.fetches("b", "t", source)
    source.computes("a", "t", end=40)
    source.finish("a")
    assert "has ended the prompt with 40 of 100 tokens computed" in decode.settled("b").failure
    source.freed("a")
    hand_over(source, decode, "next")


def test_kv_without_its_note_fails_the_request(pair: Pair) -> None:
    source, decode = pair()
    decode.fetches("b", "t", source, needs_note=True)
    source.sends("a", "t")
    assert "without the note that goes with it" in decode.settled("b").failure


# Start and end


def test_a_closed_rank_is_reported_to_the_engine(pair: Pair) -> None:
    """Regression: messages to the rank were lost, and prompts never ended."""
    source, decode = pair({"tp_size": 2})
    source.ranks[1].close()
    source.leader.offer("a", "t", PROMPT)
    source.leader.withdraw("a", "given up")
    with pytest.raises(LocalProtocolError, match="a rank has not taken"):
        wait_for(lambda: source.leader.check(), "an error for the engine", timeout_s=20)
    assert "503" in read_http(source.leader.http_address, "/readyz")
    decode.leader.check()


def read_http(address: str, path: str) -> str:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        parts = []
        while part := sock.recv(4096):
            parts.append(part)
    return b"".join(parts).decode()


def test_closing_one_side_leaves_no_file(start: Start) -> None:
    """Regression: a lock file stayed for each name, and engines use a new name at each start."""
    name = f"comes-and-goes-{os.getpid()}-"
    for _ in range(3):
        start(PREFILL, name=name).close()
        endpoint = rank_socket_address(name, 0).path
        assert list(endpoint.parent.glob(f"{endpoint.name}*")) == []
