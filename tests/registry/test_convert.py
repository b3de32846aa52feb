"""Values survive the wire, and nothing that a peer can put into a field gets past the conversion unchecked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.attaches import LLAMA, attach_request, attach_response, instance
from transfer.chunk import ChunkPlan
from transfer.errors import RemoteProtocolError
from transfer.instance import Instance, Link
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pb import kvferry_pb2 as pb
from transfer.registry import convert
from transfer.ring import Grant, Watermark

specs = st.one_of(
    st.builds(LayerSpec, num_kv_heads=st.integers(1, 64), k_head_dim=st.integers(1, 256), v_head_dim=st.integers(1, 256)),
    st.builds(
        LayerSpec, kind=st.just(LayerKind.MLA), num_kv_heads=st.just(1), k_head_dim=st.integers(1, 600), v_head_dim=st.just(0)
    ),
    st.builds(
        LayerSpec,
        kind=st.just(LayerKind.SLIDING_WINDOW),
        num_kv_heads=st.integers(1, 8),
        k_head_dim=st.just(64),
        v_head_dim=st.just(64),
        window_tokens=st.integers(1, 4096),
    ),
    st.builds(
        LayerSpec,
        kind=st.just(LayerKind.RECURRENT_STATE),
        num_kv_heads=st.integers(1, 32),
        k_head_dim=st.integers(1, 40000),
        v_head_dim=st.just(0),
        dtype=st.sampled_from((None, *DType)),
    ),
)
layouts = st.builds(KVLayout, layers=st.lists(specs, min_size=4, max_size=12).map(tuple), dtype=st.sampled_from(DType))
shards = st.builds(
    Shard,
    tp_size=st.integers(1, 8),
    pp_size=st.integers(1, 4),
    page_size=st.integers(1, 128),
    dtype=st.sampled_from(DType),
    order=st.sampled_from(TokenOrder),
)
instances = st.builds(
    Instance,
    incarnation=st.integers(1, 2**64 - 1),
    layout=layouts,
    shard=shards,
    model_fields=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
    transport=st.just("ucx"),
    digests=st.sampled_from((("xxh3-64", "kvferry-words-64"), ("kvferry-words-64",))),
    protocol_versions=st.just((1, 2)),
    capabilities=st.frozensets(st.sampled_from(["a", "b", "c"])),
    version=st.text(max_size=8),
)


@given(one=instances)
def test_an_instance_survives_the_wire(one: Instance) -> None:
    info = pb.InstanceInfo.FromString(convert.instance_to_proto(one).SerializeToString())
    assert convert.instance_from_proto(info) == one


def test_a_shard_without_dtype_travels_with_the_layouts() -> None:
    told = convert.instance_from_proto(convert.instance_to_proto(instance(shard=Shard())))
    assert told.shard.dtype is DType.FLOAT32


def test_scales_and_approximations_survive_the_wire() -> None:
    scales = tuple((0.5 + layer, 0.1 * layer + 1e-30) for layer in range(8))
    one = instance(shard=Shard(dtype=DType.FLOAT8_E4M3), kv_scales=scales, attention="xattention threshold=0.9")
    info = pb.InstanceInfo.FromString(convert.instance_to_proto(one).SerializeToString())
    assert convert.instance_from_proto(info) == one
    info.kv_scales[3].v = float("nan")
    with pytest.raises(RemoteProtocolError, match=r"kv_scales\[3\] is \(3.5, nan\); both must be between 1e-30 and 1e30"):
        convert.instance_from_proto(info)


def test_an_instance_from_before_there_were_several_digests_is_understood() -> None:
    """It sends one name, in the same field."""
    assert pb.InstanceInfo.FromString(b"\x4a\x07xxh3-64").digests == ["xxh3-64"]


def test_layers_travel_as_runs_that_end_where_a_dtype_changes() -> None:
    assert [(run.num_layers, run.num_kv_heads) for run in convert.layout_to_proto(LLAMA).runs] == [(8, 12)]
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=9, v_head_dim=0)
    exact = replace(state, dtype=DType.FLOAT32)
    layout = KVLayout(layers=(state, state, exact, exact, exact, state), dtype=DType.FLOAT32)
    info = convert.layout_to_proto(layout)
    assert [(run.num_layers, run.dtype) for run in info.runs] == [(2, ""), (3, "float32"), (1, "")]
    assert convert.layout_from_proto(info) == layout


def test_an_instance_from_before_layers_had_a_dtype_is_understood() -> None:
    """It does not send the field, and what it sends has the fingerprint that it always had."""
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=16, k_head_dim=33792, v_head_dim=0)
    attention = LayerSpec(num_kv_heads=2, k_head_dim=256, v_head_dim=256)
    one = instance(layout=KVLayout(layers=(state, state, state, attention) * 12, dtype=DType.BFLOAT16))
    info = convert.instance_to_proto(one)
    for run in info.layout.runs:
        run.ClearField("dtype")
    assert info.layout_fingerprint == "29077ae868110ffd"
    assert convert.instance_from_proto(info).layout == one.layout


def test_attach_survives_the_wire() -> None:
    request = attach_request(
        instance(shard=Shard(tp_size=4, dtype=DType.BFLOAT16)),
        prefill_rank=3,
        chunk_plan=ChunkPlan(chunk_tokens=128, layers_per_group=4),
    )
    answer = attach_response(session_id=2**64 - 1, answer=b"\x00answer")
    assert convert.attach_request_from_proto(convert.attach_request_to_proto(request)) == request
    assert convert.attach_response_from_proto(convert.attach_response_to_proto(answer)) == answer


def test_a_link_survives_the_wire() -> None:
    link = Link(prefill_rank=1, decode_rank=2, lane="ucx/shm", latency_s=2e-5, bandwidth_bytes_per_s=4e9)
    assert convert.link_from_proto(convert.link_to_proto(link)) == link
    with pytest.raises(RemoteProtocolError, match="latency_s is nan"):
        convert.link_from_proto(pb.LinkStatus(latency_s=float("nan")))


@given(
    position=st.integers(0, 2**40),
    gaps=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), max_size=70),
    capacity=st.integers(1, 2**33),
)
def test_a_watermark_survives_the_wire(position: int, gaps: list[tuple[int, int]], capacity: int) -> None:
    spans: list[Grant] = []
    edge = position
    for gap, size in gaps:
        spans.append(Grant(edge + gap, edge + gap + size))
        edge = spans[-1].end
    watermark = Watermark(incarnation=3, sequence=9, position=position, released=tuple(spans))
    ack = convert.watermark_to_proto(watermark, ring_capacity_bytes=capacity)
    assert (ack.round, ack.tail) == (position // capacity, position % capacity)
    told = convert.watermark_from_proto(ack, ring_capacity_bytes=capacity)
    assert (told.position, told.sequence, told.incarnation) == (position, 9, 3)
    assert told.released == tuple(spans[:64])


@pytest.mark.parametrize(
    ("ack", "named"),
    [
        (pb.WatermarkAck(tail=256), "tail is 256; it must be below the ring's 256 bytes"),
        (pb.WatermarkAck(released=[pb.ReleasedRange(begin=5, end=5)]), "empty or negative"),
        (pb.WatermarkAck(released=[pb.ReleasedRange(begin=2 * i + 1, end=2 * i + 2) for i in range(65)]), "65 released ranges"),
    ],
)
def test_a_broken_watermark_is_refused(ack: pb.WatermarkAck, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        convert.watermark_from_proto(ack, ring_capacity_bytes=256)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def edit(info: Any) -> None:
        *parents, name = path.split(".")
        target: Any = info
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
        setattr(target, name, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_set("layout_fingerprint", "feed"), "layout_fingerprint is 'feed'"),
        (_set("layout.dtype", "float7"), "dtype is 'float7'; known here: float32, bfloat16"),
        (_set("layout.runs.0.num_layers", 4097), "runs have 4097 layers"),
        (_set("shard.tp_size", 1025), "tp_size is 1025, pp_size 1; an instance has at most 1024 ranks"),
        (lambda info: info.shard.stage_layers.append(7), "add up to 7"),
        (_set("shard.dcp_size", 7), "dcp_size is 7; it must divide tp_size"),
        (lambda info: info.capabilities.append("a" * 257), "capabilities has a text of 257 characters; it can have 256"),
        (lambda info: info.kv_scales.append(pb.KVScales(k=1, v=1)), "kv_scales has 1 entries; a pool of float32 has none"),
        (lambda info: info.Clear(), "layout"),
    ],
)
def test_a_broken_instance_is_refused_and_the_field_named(edit: Callable[[pb.InstanceInfo], None], named: str) -> None:
    info = convert.instance_to_proto(instance())
    edit(info)
    with pytest.raises(RemoteProtocolError) as caught:
        convert.instance_from_proto(info)
    assert named in str(caught.value)


def test_a_broken_attach_is_refused_and_the_field_named() -> None:
    for edit, named in (
        (_set("prefill_rank", 9), "prefill_rank is 9"),
        (_set("chunk_plan.chunk_tokens", 0), "chunk_tokens is 0"),
        (_set("control_key", bytes(40)), "control_key has 40 bytes; it must have 32"),
    ):
        request = convert.attach_request_to_proto(attach_request(offer=b""))
        edit(request)
        with pytest.raises(RemoteProtocolError, match=named):
            convert.attach_request_from_proto(request)
    for name, wrong in (
        ("session_id", 0),
        *(("heartbeat_s", wrong) for wrong in (0.0, 1e-9, 10.1, float("nan"))),
        ("control_address", "tcp://" + "a" * 251),
        ("ring_capacity", 0),
        ("decode_rank", 5),
        ("protocol_version", 7),
        ("control_key", b""),
    ):
        told = convert.attach_response_to_proto(attach_response())
        _set(name, wrong)(told)
        with pytest.raises(RemoteProtocolError, match=name):
            convert.attach_response_from_proto(told)


def test_the_largest_values_of_a_peer_are_taken() -> None:
    """Every list and text of an instance at its bound, and both ends of the heartbeat's range."""
    for heartbeat_s in (0.05, 10.0):
        told = convert.attach_response_to_proto(attach_response())
        told.heartbeat_s = heartbeat_s
        assert convert.attach_response_from_proto(told).heartbeat_s == heartbeat_s
    fields = {f"{number:03}" + "k" * 253: "v" * 8192 for number in range(256)}
    largest = instance(
        model_fields=fields,
        version="0" * 256,
        protocol_versions=tuple(range(1, 257)),
        capabilities=frozenset(f"{number:03}" + "c" * 253 for number in range(256)),
        shard=Shard(pp_size=8, stage_layers=(1,) * 8, dtype=DType.FLOAT32),
    )
    assert convert.instance_from_proto(convert.instance_to_proto(largest)) == largest
