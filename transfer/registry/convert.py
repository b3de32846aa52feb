"""Convert proto messages to core types and back. Values from a peer are checked here.

Raises:
    RemoteProtocolError: A field is invalid; the message has its name and value. Only `sampling_from_proto` raises another error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, TypeVar

from transfer.chunk import ChunkPlan
from transfer.config import MAX_HEARTBEAT_S, MIN_HEARTBEAT_S
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError, LayoutError, LocalProtocolError, RemoteProtocolError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link
from transfer.layout import MAX_LAYERS, MAX_RANKS, DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.messages import clip_reason
from transfer.pb import kvferry_pb2 as pb
from transfer.ring import MAX_PUBLISHED_RANGES, Grant, Watermark

MAX_NAMES: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_MODEL_FIELD_CHARS: Final = 8192
"""Limits of the lists and texts of an instance, which are checked before anything is copied. They are far above every model: the
longest field is a table of rotary factors with 3,000 characters."""

_MAX_POSITION: Final = 1 << 63

_Choice = TypeVar("_Choice", bound=StrEnum)


def instance_to_proto(instance: Instance) -> pb.InstanceInfo:
    layout = instance.layout
    shard = instance.shard
    return pb.InstanceInfo(
        incarnation=instance.incarnation,
        protocol_versions=instance.protocol_versions,
        layout_fingerprint=layout.fingerprint(),
        layout=layout_to_proto(layout),
        model_fingerprint=instance.model_fingerprint(),
        model_fields=dict(instance.model_fields),
        shard=pb.ShardInfo(
            tp_size=shard.tp_size,
            pp_size=shard.pp_size,
            page_size=shard.page_size,
            dtype=str(shard.pool_dtype(layout)),
            order=str(shard.order),
            stage_layers=shard.stage_layers or (),
            dcp_size=shard.dcp_size,
            interleave_tokens=shard.interleave_tokens,
        ),
        transport=instance.transport,
        transports=instance.transports,
        digests=instance.digests,
        capabilities=sorted(instance.capabilities),
        version=instance.version,
        kv_scales=[pb.KVScales(k=k, v=v) for k, v in instance.kv_scales],
        attention=instance.attention,
    )


def instance_from_proto(info: pb.InstanceInfo) -> Instance:
    """Return the peer's instance; its shard is that of rank 0."""
    with _refusing("instance"):
        _check_sizes(info)
        layout = layout_from_proto(info.layout)
        instance = Instance(
            incarnation=info.incarnation,
            layout=layout,
            shard=_shard_from_proto(info.shard),
            model_fields=dict(info.model_fields),
            transport=info.transport,
            transports=tuple(info.transports),
            digests=tuple(info.digests),
            kv_scales=tuple((scales.k, scales.v) for scales in info.kv_scales),
            protocol_versions=tuple(info.protocol_versions),
            capabilities=frozenset(info.capabilities),
            version=info.version,
            attention=info.attention,
        )
    for name, reported, computed in (
        ("layout_fingerprint", info.layout_fingerprint, layout.fingerprint()),
        ("model_fingerprint", info.model_fingerprint, instance.model_fingerprint()),
    ):
        if reported != computed:
            raise RemoteProtocolError(f"instance: {name} is {reported[:64]!r}; its settings have {computed}")
    return instance


def transport_names(info: pb.InstanceInfo) -> tuple[str, ...]:
    """Return the names of an instance's data planes, preferred first; none if it has no ranks."""
    return tuple(info.transports) or ((info.transport,) if info.transport else ())


def layout_to_proto(layout: KVLayout) -> pb.LayoutInfo:
    runs: list[pb.LayerRun] = []
    previous: LayerSpec | None = None
    for spec in layout.layers:
        if spec == previous:
            runs[-1].num_layers += 1
            continue
        previous = spec
        runs.append(
            pb.LayerRun(
                num_layers=1,
                kind=str(spec.kind),
                num_kv_heads=spec.num_kv_heads,
                k_head_dim=spec.k_head_dim,
                v_head_dim=spec.v_head_dim,
                window_tokens=spec.window_tokens,
                dtype=str(spec.dtype or ""),
            )
        )
    return pb.LayoutInfo(dtype=str(layout.dtype), runs=runs)


def layout_from_proto(info: pb.LayoutInfo) -> KVLayout:
    """Return the layout that a peer reports."""
    with _refusing("layout"):
        _check_count("runs", len(info.runs), MAX_LAYERS)
        num_layers = sum(run.num_layers for run in info.runs)
        if num_layers > MAX_LAYERS or any(run.num_layers == 0 for run in info.runs):
            raise LayoutError(f"runs have {num_layers} layers; each must have 1 or more, all at most {MAX_LAYERS}")
        layers: list[LayerSpec] = []
        for run in info.runs:
            spec = LayerSpec(
                kind=_known(LayerKind, "kind", run.kind),
                num_kv_heads=run.num_kv_heads,
                k_head_dim=run.k_head_dim,
                v_head_dim=run.v_head_dim,
                window_tokens=run.window_tokens,
                dtype=_known(DType, "dtype", run.dtype) if run.dtype else None,
            )
            layers += [spec] * run.num_layers
        return KVLayout(layers=tuple(layers), dtype=_known(DType, "dtype", info.dtype))


def chunk_plan_to_proto(plan: ChunkPlan) -> pb.ChunkPlanInfo:
    return pb.ChunkPlanInfo(
        chunk_tokens=plan.chunk_tokens, layers_per_group=plan.layers_per_group, token_layers=plan.token_layers
    )


def chunk_plan_from_proto(info: pb.ChunkPlanInfo) -> ChunkPlan:
    """Return the chunk plan of a peer."""
    with _refusing("chunk_plan"):
        return ChunkPlan(chunk_tokens=info.chunk_tokens, layers_per_group=info.layers_per_group, token_layers=info.token_layers)


def link_to_proto(link: Link, *, peer_incarnation: int = 0) -> pb.LinkStatus:
    """Convert a link. `peer_incarnation` is that of the node at the other end, if the context does not define it."""
    return pb.LinkStatus(
        prefill_rank=link.prefill_rank,
        decode_rank=link.decode_rank,
        lane=link.lane,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        peer_incarnation=peer_incarnation,
        obstacle=link.obstacle,
    )


def link_from_proto(info: pb.LinkStatus) -> Link:
    """Return a peer's measurements of a link."""
    with _refusing("link"):
        return Link(
            prefill_rank=info.prefill_rank,
            decode_rank=info.decode_rank,
            lane=info.lane[:64],
            latency_s=info.latency_s,
            bandwidth_bytes_per_s=info.bandwidth_bytes_per_s,
            obstacle=clip_reason(info.obstacle),
        )


def attach_request_to_proto(request: AttachRequest) -> pb.AttachRequest:
    return pb.AttachRequest(
        prefill=instance_to_proto(request.prefill),
        prefill_rank=request.prefill_rank,
        offer=request.offer,
        chunk_plan=chunk_plan_to_proto(request.chunk_plan),
        probe_bytes=request.probe_bytes,
        control_key=request.control_key,
    )


def attach_request_from_proto(info: pb.AttachRequest) -> AttachRequest:
    """Return the attach of a writer."""
    with _refusing("attach"):
        return AttachRequest(
            prefill=instance_from_proto(info.prefill),
            prefill_rank=info.prefill_rank,
            offer=info.offer,
            chunk_plan=chunk_plan_from_proto(info.chunk_plan),
            probe_bytes=info.probe_bytes,
            control_key=info.control_key,
        )


def attach_response_to_proto(response: AttachResponse) -> pb.AttachResponse:
    return pb.AttachResponse(
        session_id=response.session_id,
        decode=instance_to_proto(response.decode),
        decode_rank=response.decode_rank,
        answer=response.answer,
        ring_capacity=response.ring_capacity_bytes,
        control_address=response.control_address,
        heartbeat_s=response.heartbeat_s,
        protocol_version=response.protocol_version,
        probe_bytes=response.probe_bytes,
        control_key=response.control_key,
        local_control_address=response.local_control_address,
    )


def attach_response_from_proto(info: pb.AttachResponse) -> AttachResponse:
    """Return the answer to an attach."""
    with _refusing("attach answer"):
        _check_texts("control_address", (info.control_address,), MAX_NAME_CHARS)
        _check_texts("local_control_address", (info.local_control_address,), MAX_NAME_CHARS)
        if not MIN_HEARTBEAT_S <= info.heartbeat_s <= MAX_HEARTBEAT_S:
            raise LayoutError(f"heartbeat_s is {info.heartbeat_s}; it must be in [{MIN_HEARTBEAT_S:g}, {MAX_HEARTBEAT_S:g}]")
        return AttachResponse(
            session_id=info.session_id,
            decode=instance_from_proto(info.decode),
            decode_rank=info.decode_rank,
            answer=info.answer,
            ring_capacity_bytes=info.ring_capacity,
            control_address=info.control_address,
            heartbeat_s=info.heartbeat_s,
            protocol_version=info.protocol_version,
            probe_bytes=info.probe_bytes,
            control_key=info.control_key,
            local_control_address=info.local_control_address,
        )


def watermark_to_proto(watermark: Watermark, *, ring_capacity_bytes: int) -> pb.WatermarkAck:
    """Return the ack of a watermark: its position as (round, tail), and the released ranges."""
    position_round, tail = divmod(watermark.position, ring_capacity_bytes)
    return pb.WatermarkAck(
        incarnation=watermark.incarnation,
        sequence=watermark.sequence,
        round=position_round,
        tail=tail,
        released=[pb.ReleasedRange(begin=span.begin, end=span.end) for span in watermark.released[:MAX_PUBLISHED_RANGES]],
    )


def watermark_from_proto(ack: pb.WatermarkAck, *, ring_capacity_bytes: int) -> Watermark:
    """Return the watermark of an ack."""
    if ack.tail >= ring_capacity_bytes:
        raise RemoteProtocolError(f"watermark: tail is {ack.tail}; it must be below the ring's {ring_capacity_bytes} bytes")
    position = ack.round * ring_capacity_bytes + ack.tail
    if position >= _MAX_POSITION:
        raise RemoteProtocolError(f"watermark: round is {ack.round}; no ring gets that far")
    if len(ack.released) > MAX_PUBLISHED_RANGES:
        raise RemoteProtocolError(f"watermark: {len(ack.released)} released ranges; there can be {MAX_PUBLISHED_RANGES}")
    with _refusing("watermark"):
        return Watermark(
            incarnation=ack.incarnation,
            sequence=ack.sequence,
            position=position,
            released=tuple(Grant(span.begin, span.end) for span in ack.released),
        )


def _shard_from_proto(info: pb.ShardInfo) -> Shard:
    return Shard(
        tp_size=info.tp_size,
        pp_size=info.pp_size,
        page_size=info.page_size,
        dtype=_known(DType, "shard.dtype", info.dtype),
        order=_known(TokenOrder, "shard.order", info.order),
        stage_layers=tuple(info.stage_layers) or None,
        dcp_size=info.dcp_size or 1,
        interleave_tokens=info.interleave_tokens or 1,
    )


def _check_sizes(info: pb.InstanceInfo) -> None:
    """Raise LayoutError if lists or texts of an instance are too long: copies and log lines of them cost memory."""
    _check_count("protocol_versions", len(info.protocol_versions), MAX_NAMES)
    _check_count("model_fields", len(info.model_fields), MAX_NAMES)
    _check_count("capabilities", len(info.capabilities), MAX_NAMES)
    _check_count("shard.stage_layers", len(info.shard.stage_layers), MAX_RANKS)
    _check_count("digests", len(info.digests), MAX_NAMES)
    _check_count("transports", len(info.transports), MAX_NAMES)
    _check_count("kv_scales", len(info.kv_scales), MAX_LAYERS)
    for name in ("transport", "version", "attention"):
        _check_texts(name, (getattr(info, name),), MAX_NAME_CHARS)
    _check_texts("digests", info.digests, MAX_NAME_CHARS)
    _check_texts("transports", info.transports, MAX_NAME_CHARS)
    _check_texts("capabilities", info.capabilities, MAX_NAME_CHARS)
    _check_texts("model_fields", info.model_fields, MAX_NAME_CHARS)
    _check_texts("model_fields", info.model_fields.values(), MAX_MODEL_FIELD_CHARS)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise LayoutError(f"{name} has {count} entries; there can be {most}")


def _check_texts(name: str, texts: Iterable[str], most: int) -> None:
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise LayoutError(f"{name} has a text of {longest} characters; it can have {most}")


def _known(kind: type[_Choice], name: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise LayoutError(f"{name} is {value[:64]!r}; known here: {', '.join(kind)}") from None


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Convert errors of the core types: the peer's values caused them."""
    try:
        yield
    except (LayoutError, ConfigError, LocalProtocolError) as error:
        raise RemoteProtocolError(f"{what}: {error}") from error


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed)


def sampling_from_proto(info: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a request.

    Raises:
        ConfigError: A value is out of its range.
    """
    return SamplingParams(temperature=info.temperature, top_p=info.top_p or 1.0, top_k=info.top_k, seed=info.seed)
