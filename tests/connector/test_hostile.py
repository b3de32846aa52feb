"""Calls of a connector's leaders that no honest peer makes, one kind for each method; tests/registry has every field."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.connector.conftest import Pair
from tests.connector.instances import PROMPT, TIMEOUT_S, hand_over
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc

SERVED = [
    (service.name, method.name)
    for service in pb.DESCRIPTOR.services_by_name.values()
    if service.name in ("PrefillControl", "DecodeControl")
    for method in service.methods
    if method.name not in ("Status", "Drain")
]
UNKNOWN_LIFE = pb.PrefillRequest(
    request_id="a", engine_request="t", token_ids=PROMPT, decode_incarnation=7, sampling=pb.SamplingParams(top_p=1.0)
)


def test_what_no_honest_peer_asks_is_refused_and_both_sides_serve_on(pair: Pair) -> None:
    source, decode = pair()
    for service, method in SERVED:
        address = (source if service == "PrefillControl" else decode).leader.address
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_stream(f"/kvferry.v1.{service}/{method}")
            for payload in (b"\xff" * 64, b"", b"\x0a\x05a\nb\xff\x00", UNKNOWN_LIFE.SerializeToString()):
                if method == "Abort" and payload != b"\xff" * 64:
                    continue  # there is nothing that it could mean
                with pytest.raises(grpc.RpcError) as refusal:
                    list(call(payload, timeout=TIMEOUT_S))
                assert refusal.value.code() is not grpc.StatusCode.INTERNAL, (method, payload, refusal.value.details())
                assert len(refusal.value.details().splitlines()) <= 1
    hand_over(source, decode, "next")
    source.leader.check()


def test_a_drain_of_a_prefill_side_waits_for_prompts_that_nobody_has_fetched_yet(pair: Pair) -> None:
    """Computed prompts hold the engine's pages for a decode side that will ask for them: they would be lost."""
    source, decode = pair()
    source.sends("a", "t")
    with grpc.insecure_channel(source.leader.address) as channel:
        stub: Any = pb_grpc.PrefillControlStub(channel)
        assert stub.Drain(pb.DrainRequest(), timeout=2.0).remaining == 1
        draining = stub.Drain.future(pb.DrainRequest(), timeout=TIMEOUT_S)
        decode.leader.decline("t", source.leader.address, "its client went away")
        assert draining.result().remaining == 0
