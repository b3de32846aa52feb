"""What comes over gRPC, past protobuf: `transfer.registry.convert`, and what `transfer.instance` decides by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from fuzz.protos import changed_message
from fuzz.target import Target, require
from fuzz.trees import BYTE_SHARE, changed_bytes
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError, LayoutError, RemoteProtocolError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible, conversion_scales
from transfer.layout import MAX_LAYERS, MAX_RANKS, DType, KVLayout, LayerKind, LayerSpec, Shard, routes
from transfer.pb import kvferry_pb2 as pb
from transfer.registry import convert
from transfer.registry.convert import MAX_NAMES
from transfer.registry.heartbeats import checked_idle_heartbeat_s
from transfer.ring import MAX_PUBLISHED_RANGES, Grant, Watermark

RING_BYTES = 1 << 20
MIXED = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=8),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=8, v_head_dim=8, window_tokens=32),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=12, v_head_dim=0, dtype=DType.FLOAT32),
    ),
    dtype=DType.BFLOAT16,
)


def _instance(incarnation: int, **changes: Any) -> Instance:
    values: dict[str, Any] = {
        "incarnation": incarnation,
        "layout": MIXED,
        "shard": Shard(tp_size=2, dtype=DType.FLOAT8_E4M3),
        "model_fields": {"architecture": "none", "weights": "some"},
        "transport": "ucx",
        "digests": ("xxh3-64", "kvferry-words-64"),
        "protocol_versions": (1,),
        "capabilities": frozenset({"layer_groups", "attention_in_keys"}),
        "version": "0.1.0",
        "kv_scales": ((0.5, 2.0), (1.0, 1.0), (1.0, 1.0)),
    }
    return Instance(**values | changes)


OWN = _instance(22, shard=Shard(tp_size=4), kv_scales=())
PLAN = ChunkPlan(chunk_tokens=16, layers_per_group=1)


def _check_instance(info: pb.InstanceInfo) -> None:
    instance = convert.instance_from_proto(info)
    require(convert.instance_from_proto(convert.instance_to_proto(instance)) == instance, "an instance does not survive the wire")
    require(0 < instance.incarnation < 2**64, "an incarnation out of range")
    require(instance.layout.num_layers <= MAX_LAYERS and instance.shard.num_ranks <= MAX_RANKS, "an instance without a bound")
    lists = (
        instance.model_fields,
        instance.digests,
        instance.transports,
        instance.protocol_versions,
        instance.capabilities,
    )
    require(all(len(names) <= MAX_NAMES for names in lists), "an instance with endless names")
    if instance.shard.num_ranks <= 64:  # with more it takes a while; that it ends is the layout's own test
        for prefill, decode in ((instance, OWN), (OWN, instance)):
            agreement = check_compatible(prefill, decode)
            require(agreement.digest in prefill.digests, "a digest that one side does not have")
            conversion_scales(prefill, decode)
            require(routes(prefill.layout, prefill.shard, decode.shard), "two instances that fit, and no route")


def _check_layout(info: pb.LayoutInfo) -> None:
    layout = convert.layout_from_proto(info)
    require(1 <= layout.num_layers <= MAX_LAYERS, "a layout without a bound")
    require(convert.layout_from_proto(convert.layout_to_proto(layout)) == layout, "a layout does not survive the wire")


def _check_plan(info: pb.ChunkPlanInfo) -> None:
    plan = convert.chunk_plan_from_proto(info)
    require(plan.chunk_tokens >= 1 and plan.layers_per_group >= 0, f"{plan!r} is out of range")
    require(convert.chunk_plan_to_proto(plan) == info, "a plan does not survive the wire")


def _check_link(info: pb.LinkStatus) -> None:
    link = convert.link_from_proto(info)
    require(0 <= link.latency_s < float("inf") and 0 <= link.bandwidth_bytes_per_s < float("inf"), f"{link!r} is out of range")
    require(len(link.lane) <= 64, "a lane without a bound")


def _check_attach_request(info: pb.AttachRequest) -> None:
    request = convert.attach_request_from_proto(info)
    require(0 <= request.prefill_rank < request.prefill.shard.num_ranks, "a rank that its instance does not have")
    require(request.probe_bytes > 0, "a probe of nothing")
    again = convert.attach_request_from_proto(convert.attach_request_to_proto(request))
    require(again == request, "an attach does not survive the wire")


def _check_attach_response(info: pb.AttachResponse) -> None:
    answer = convert.attach_response_from_proto(info)
    require(0 < answer.heartbeat_s <= 10 and answer.ring_capacity_bytes > 0, f"{answer!r} is out of range")
    require(0 < len(answer.control_address) <= 256, "a control address without a bound")
    again = convert.attach_response_from_proto(convert.attach_response_to_proto(answer))
    require(again == answer, "an answer does not survive the wire")


def _check_watermark(ack: pb.WatermarkAck) -> None:
    watermark = convert.watermark_from_proto(ack, ring_capacity_bytes=RING_BYTES)
    require(0 <= watermark.position < 2**63 and len(watermark.released) <= MAX_PUBLISHED_RANGES, f"{watermark!r} has no bound")
    again = convert.watermark_to_proto(watermark, ring_capacity_bytes=RING_BYTES)
    again.idle_heartbeat_s = checked_idle_heartbeat_s(ack.idle_heartbeat_s)  # no part of the ring's state
    again.probe_turn = ack.probe_turn
    require(0 <= again.idle_heartbeat_s <= 10, "an interval without a bound")
    require(again == ack, "a watermark does not survive the wire")


def _check_sampling(info: pb.SamplingParams) -> None:
    sampling = convert.sampling_from_proto(info)
    require(0 <= sampling.temperature < float("inf") and 0 < sampling.top_p <= 1, f"{sampling!r} is out of range")
    require(sampling.top_k >= 0 and 0 <= sampling.seed < 2**63, f"{sampling!r} is out of range")


def _answer() -> AttachResponse:
    return AttachResponse(
        session_id=2**64 - 1,
        decode=OWN,
        decode_rank=1,
        answer=b"\x00answer",
        ring_capacity_bytes=RING_BYTES,
        control_address="tcp://10.0.0.1:5555",
        heartbeat_s=0.5,
        protocol_version=1,
        probe_bytes=4096,
        control_key=bytes(range(32)),
    )


def _attach() -> AttachRequest:
    return AttachRequest(
        prefill=_instance(11), prefill_rank=1, offer=b"\x00offer", chunk_plan=PLAN, probe_bytes=4096, control_key=bytes(32)
    )


def _samples() -> list[Message]:
    mark = Watermark(incarnation=22, sequence=7, position=3 * RING_BYTES + 512, released=(Grant(2**22, 2**22 + 256),))
    link = Link(prefill_rank=0, decode_rank=1, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    ack = convert.watermark_to_proto(mark, ring_capacity_bytes=RING_BYTES)
    ack.idle_heartbeat_s, ack.probe_turn = 0.5, True
    return [
        convert.instance_to_proto(_instance(11)),
        convert.layout_to_proto(MIXED),
        convert.chunk_plan_to_proto(PLAN),
        convert.link_to_proto(link),
        convert.attach_request_to_proto(_attach()),
        convert.attach_response_to_proto(_answer()),
        ack,
        convert.sampling_to_proto(SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=2**63 - 1)),
    ]


_KINDS: tuple[tuple[type[Message], Callable[[Any], None]], ...] = (
    (pb.InstanceInfo, _check_instance),
    (pb.LayoutInfo, _check_layout),
    (pb.ChunkPlanInfo, _check_plan),
    (pb.LinkStatus, _check_link),
    (pb.AttachRequest, _check_attach_request),
    (pb.AttachResponse, _check_attach_response),
    (pb.WatermarkAck, _check_watermark),
    (pb.SamplingParams, _check_sampling),
)


def _parsed(data: bytes) -> tuple[int, Message]:
    """The first byte says which message the others are."""
    number = data[0] % len(_KINDS) if data else 0
    message = _KINDS[number][0].FromString(data[1:])
    message.DiscardUnknownFields()  # a later version's
    return number, message


def check(data: bytes) -> None:
    try:
        number, message = _parsed(data)
    except DecodeError:
        return  # refused before: transfer/registry/guard.py
    _KINDS[number][1](message)


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() >= BYTE_SHARE:
        try:
            number, message = _parsed(data)
        except DecodeError:
            pass
        else:
            changed_message(message, rng)
            if isinstance(message, pb.InstanceInfo | pb.AttachRequest | pb.AttachResponse) and rng.random() < 0.9:
                _told_truly(message)
            return bytes([number]) + message.SerializeToString(deterministic=True)
    return changed_bytes(data, rng)


def _told_truly(message: pb.InstanceInfo | pb.AttachRequest | pb.AttachResponse) -> None:
    """Have the fingerprints agree with what they are of; otherwise nearly every change would end there."""
    info = (
        message
        if isinstance(message, pb.InstanceInfo)
        else message.prefill
        if isinstance(message, pb.AttachRequest)
        else message.decode
    )
    try:
        layout = convert.layout_from_proto(info.layout)
    except RemoteProtocolError:
        return
    info.layout_fingerprint = layout.fingerprint()
    info.model_fingerprint = _instance(1, model_fields=dict(info.model_fields)).model_fingerprint()


TARGET = Target(
    name="registry",
    about="gRPC messages (protobuf)",
    modules=("transfer.registry.convert", "transfer.instance", "transfer.layout", "transfer.chunk"),
    check=check,
    refuses=(RemoteProtocolError, LayoutError, ConfigError),
    mutate=mutate,
    seeds=lambda: [bytes([number]) + message.SerializeToString(deterministic=True) for number, message in enumerate(_samples())],
    max_bytes=16 * 1024,
    max_line_chars=5000,
)
