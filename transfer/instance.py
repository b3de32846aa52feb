"""Descriptions that one tier sends the other, and whether the two can work together. Pure: no sockets, no clock.

`Instance` is a rank group's identity and sharding. `AttachRequest` and `AttachResponse` open one writer's session with it. Only
`check_compatible()` decides whether two instances fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from transfer.chunk import ChunkPlan
from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, Shard, dcp_differences, named_differences, wire_dtype
from transfer.ring import ALIGNMENT_BYTES

CAPABILITIES: Final = frozenset(
    {
        "attention_in_keys",
        "early_room",
        "late_start_token",
        "layer_groups",
        "one_join",
        "probe_bursts",
        "probe_turns",
        "prompt_stream",
        "resend_once",
        "room_in_stream",
        "selective_release",
        "token_layers",
        "token_shards",
        "undrain",
    }
)
"""Abilities that a peer may lack. Features that need one are used only if the peer names it. Every peer of protocol version 1 has
layer_groups, resend_once and selective_release.

- attention_in_keys: a decode side names the prefill side's `attention` in the keys of stored pages. Without this, such sides do
  not fit, because other prefill nodes would load the pages.
- early_room: a prefill side accepts `early_room_plan` in `PrefillIntoRoom`, and lists all of its chunk plans in `Joined`.
- late_start_token: a prefill side accepts a later start token in `PrefillRoom` or `ReserveResponse`.
- one_join: a prefill side that a decode instance joins by two of its addresses keeps the first join, and reports that.
- layer_groups: chunks may hold a part of the layers, so that the first layers travel while the last are computed.
- probe_bursts: the link probe of a two-sided transport ends with bursts of writes, which the target expects.
- probe_turns: a writer waits for its turn before it measures a link, and a decode rank grants turns.
- prompt_stream: a prefill side supports `StreamPrompts`.
- resend_once: a chunk whose bytes arrive broken is sent a second time.
- room_in_stream: a prefill side supports `PrefillIntoRoom`, and then does not call `Reserve`.
- selective_release: watermarks name released ranges above their position, which the writer may use again at once.
- token_layers: a decode side divides requests as `ChunkPlan.token_layers` says.
- token_shards: a side knows decode context parallelism (`Shard.dcp_size`).
- undrain: a decode side is told in its join that the prefill side takes requests again.
"""

CONTROL_KEY_BYTES: Final = 32
"""Size of a public key of the control plane (Curve25519)."""

_SHOWN_CHARS: Final = 200
MAX_DIFFERENCES_CHARS: Final = 4000
"""Length of a list of differences: it goes into logs, and the peer wrote most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One life of a rank group.

    Args:
        incarnation: Random id of this life, in [1, 2**64).
        layout: The KV of its model.
        shard: Sharding of its ranks. The rank in it does not matter; `at()` returns each rank's.
        model_fields: Everything of the model that must be equal (architecture, vocabulary, weights digest), by name.
        transport: Name of the data plane, for example ``ucx``. If there are several, the one that older peers use.
        transports: Names of all data planes, preferred first; empty means `transport` alone.
        digests: Payload digests that its ranks can compute, preferred first, for example ``("xxh3-64", "kvferry-words-64")``.
        protocol_versions: Supported versions, ascending.
        capabilities: Abilities by name, see `CAPABILITIES`.
        version: kvferry's version, for people.
        kv_scales: For a pool of 8-bit floats, (of K, of V) for each layer: a stored value times its scale is the computed value.
            Empty means 1.0 everywhere.
        attention: How its prefill approximates attention, in any words; empty for full attention. It changes the KV of a prompt.
    """

    incarnation: int
    layout: KVLayout
    shard: Shard
    model_fields: Mapping[str, str] = field(default_factory=dict)
    transport: str
    transports: tuple[str, ...] = ()
    digests: tuple[str, ...]
    protocol_versions: tuple[int, ...]
    capabilities: frozenset[str] = frozenset()
    version: str = ""
    kv_scales: tuple[tuple[float, float], ...] = ()
    attention: str = ""

    def __post_init__(self) -> None:
        check_id("incarnation", self.incarnation)
        if not self.transport:
            raise LayoutError("transport is empty; an instance names the one it uses")
        if not self.digests or not all(self.digests) or len(set(self.digests)) != len(self.digests):
            raise LayoutError(f"digests is {_shown(self.digests)}; it must name one or more, each once")
        if not self.protocol_versions or list(self.protocol_versions) != sorted(set(self.protocol_versions)):
            raise LayoutError(f"protocol_versions is {_shown(self.protocol_versions)}; it must name one or more, ascending")
        self.shard.check_dcp(self.layout)
        self.shard.layers(self.layout)  # reject a stage list that does not fit the model here, not at the first route
        if self.kv_scales:
            self._check_scales()
        object.__setattr__(self, "model_fields", dict(self.model_fields))

    @property
    def transport_names(self) -> tuple[str, ...]:
        """Names of all data planes, preferred first."""
        return self.transports or (self.transport,)

    @property
    def pool_dtype(self) -> DType:
        return self.shard.pool_dtype(self.layout)

    def _check_scales(self) -> None:
        if self.pool_dtype is not DType.FLOAT8_E4M3:
            raise LayoutError(f"kv_scales has {len(self.kv_scales)} entries; a pool of {self.pool_dtype} has none")
        if len(self.kv_scales) != self.layout.num_layers:
            raise LayoutError(f"kv_scales has {len(self.kv_scales)} entries; the model has {self.layout.num_layers} layers")
        for layer, (k, v) in enumerate(self.kv_scales):
            if not (1e-30 <= k <= 1e30 and 1e-30 <= v <= 1e30):  # as copies take them: their reciprocals are float32 too
                raise LayoutError(f"kv_scales[{layer}] is ({k}, {v}); both must be between 1e-30 and 1e30")

    def scales_of(self, layer: int) -> tuple[float, float]:
        """Return the scales of K and of V."""
        return self.kv_scales[layer] if self.kv_scales else (1.0, 1.0)

    def model_fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly if `model_fields` are."""
        canonical = json.dumps(dict(self.model_fields), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The protocol between two compatible instances.

    Args:
        protocol_version: The highest version that both support.
        digest: Algorithm of the payload digests: the first of prefill's that decode has too.
    """

    protocol_version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A measured link between a prefill rank and a decode rank.

    Args:
        lane: Carrier of the bytes, for example ``ucx/shm``.
        latency_s: Latency of a small write, in seconds.
        bandwidth_bytes_per_s: Bandwidth of a large write.
        obstacle: Reason why the link does not use a faster transport; empty if no faster one was expected.
    """

    prefill_rank: int
    decode_rank: int
    lane: str
    latency_s: float
    bandwidth_bytes_per_s: float
    obstacle: str = ""

    def __post_init__(self) -> None:
        if self.prefill_rank < 0 or self.decode_rank < 0:
            raise LayoutError(f"link {self.prefill_rank} -> {self.decode_rank}; ranks are not negative")
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """A prefill rank asks a decode rank for a session.

    Args:
        prefill: The writer's instance.
        prefill_rank: The writer's rank in it.
        offer: The writer's half of the data-plane session, opaque (`transport.Offer.blob`).
        chunk_plan: The finest way in which requests are divided. Each request names its own plan.
        probe_bytes: Largest write of the writer's link probe.
        control_key: The writer's public key on the control plane. The session accepts messages of no other.
    """

    prefill: Instance
    prefill_rank: int
    offer: bytes
    chunk_plan: ChunkPlan
    probe_bytes: int
    control_key: bytes

    def __post_init__(self) -> None:
        _check_rank("prefill_rank", self.prefill_rank, self.prefill)
        _check_key(self.control_key)
        if self.probe_bytes < 1:
            raise LayoutError(f"probe_bytes is {self.probe_bytes}; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachResponse:
    """A decode rank's answer. The session is open when the writer has completed its half.

    Args:
        session_id: Random, in [1, 2**64); names the session on every plane.
        decode: The target's instance.
        decode_rank: The target's rank in it.
        answer: The target's half of the data-plane session, opaque.
        ring_capacity_bytes: Size of the rank's ring, a multiple of `transfer.ring.ALIGNMENT_BYTES`.
        control_address: Address of the rank's control channel.
        local_control_address: ``unix://`` address of the same channel for processes of the same user; empty if there is none.
        heartbeat_s: Seconds between heartbeats of the session, above 0.
        protocol_version: The version to use, as `check_compatible` chose it.
        probe_bytes: Size of the link probe's bulk write: the smaller of both sides' limits.
        control_key: The rank's public key on the control plane.
    """

    session_id: int
    decode: Instance
    decode_rank: int
    answer: bytes
    ring_capacity_bytes: int
    control_address: str
    heartbeat_s: float
    protocol_version: int
    probe_bytes: int
    control_key: bytes
    local_control_address: str = ""

    def __post_init__(self) -> None:
        check_id("session_id", self.session_id)
        if self.probe_bytes < 1:
            raise LayoutError(f"probe_bytes is {self.probe_bytes}; it must be positive")
        _check_rank("decode_rank", self.decode_rank, self.decode)
        if self.ring_capacity_bytes < 1 or self.ring_capacity_bytes % ALIGNMENT_BYTES:
            # Where grants lie is their position modulo it: kernels that gather into the ring rely on the alignment.
            raise LayoutError(
                f"ring_capacity_bytes is {self.ring_capacity_bytes}; it must be a positive multiple of {ALIGNMENT_BYTES}"
            )
        _check_key(self.control_key)
        if not self.control_address:
            raise LayoutError("control_address is empty; a decode rank names its control channel")
        if not 0 < self.heartbeat_s < float("inf"):
            raise LayoutError(f"heartbeat_s is {self.heartbeat_s}; it must be finite and above 0")
        if self.protocol_version not in self.decode.protocol_versions:
            spoken = _listed(self.decode.protocol_versions)
            raise LayoutError(f"protocol_version is {self.protocol_version}; the decode instance speaks {spoken}")


def _check_key(key: bytes) -> None:
    if len(key) != CONTROL_KEY_BYTES:
        raise LayoutError(f"control_key has {len(key)} bytes; it must have {CONTROL_KEY_BYTES}")


def check_compatible(prefill: Instance, decode: Instance) -> Agreement:
    """Return the agreement of the two instances. Each side and its operator get the same line, so the sides are named.

    Raises:
        LayoutError: They do not fit. One line with both fingerprints and every differing field with both values, prefill's first,
            up to `MAX_DIFFERENCES_CHARS`.
    """
    differences = prefill.layout.differences(decode.layout)
    differences += [f"model {text}" for text in named_differences(dict(prefill.model_fields), dict(decode.model_fields))]
    if not set(prefill.transport_names) & set(decode.transport_names):
        differences.append(f"transport: {_listed(prefill.transport_names)} != {_listed(decode.transport_names)}")
    digests = [name for name in prefill.digests if name in decode.digests]
    if not digests:
        differences.append(f"digests: {_listed(prefill.digests)} != {_listed(decode.digests)}")
    common = set(prefill.protocol_versions) & set(decode.protocol_versions)
    if not common:
        differences.append(f"protocol_versions: {_listed(prefill.protocol_versions)} != {_listed(decode.protocol_versions)}")
    if prefill.attention and "attention_in_keys" not in decode.capabilities:
        differences.append(f"attention: {_shown((prefill.attention,))} != () (the decode side is older than attention_in_keys)")
    differences += _dcp_differences(prefill, decode)
    if not differences:
        try:
            wire_dtype(prefill.layout, prefill.shard, decode.shard)
        except LayoutError as error:
            differences.append(str(error))
    if not differences:
        differences += _scale_differences(prefill, decode)
    if differences:
        listed = " ".join("; ".join(differences).split())  # one line, whatever the peer's words are
        if len(listed) > MAX_DIFFERENCES_CHARS:
            listed = f"{listed[:MAX_DIFFERENCES_CHARS]}... ({len(differences)} differences in all)"
        raise LayoutError(
            f"the instances do not fit: layout prefill {prefill.layout.fingerprint()}, decode {decode.layout.fingerprint()}; "
            f"model prefill {prefill.model_fingerprint()}, decode {decode.model_fingerprint()}; prefill != decode: {listed}"
        )
    return Agreement(protocol_version=max(common), digest=digests[0])


def conversion_scales(own: Instance, peer: Instance) -> dict[tuple[int, bool], float] | None:
    """Return the scales of the conversion between this side's pool and the wire, for two instances that fit.

    Only a pool with another element type than the wire's is converted. The wire then has the element type of the peer's pool, so
    the scales are the peer's: values are divided by them before they are narrowed, and multiplied after they are widened. The
    result is (layer, whether it is V) -> scale, without layers that travel in their own element type; None if nothing is scaled.
    """
    wire = wire_dtype(own.layout, own.shard, peer.shard)
    if own.pool_dtype is wire or not peer.kv_scales:
        return None
    return {
        (layer, is_v): peer.scales_of(layer)[is_v]
        for layer, spec in enumerate(own.layout.layers)
        if spec.dtype is None
        for is_v in ((False, True) if spec.v_head_dim else (False,))
    }


def _dcp_differences(prefill: Instance, decode: Instance) -> list[str]:
    """Return differences of decode context parallelism. A side that does not know it would send or expect every token."""
    for name, old, other in (("prefill", prefill, decode), ("decode", decode, prefill)):
        if other.shard.dcp_size > 1 and "token_shards" not in old.capabilities:
            sizes = f"{prefill.shard.dcp_size} != {decode.shard.dcp_size}"
            return [f"dcp_size: {sizes} (the {name} side is older than token_shards)"]
    return dcp_differences(prefill.shard, decode.shard)


def _scale_differences(prefill: Instance, decode: Instance) -> list[str]:
    """Return differences of scales between two pools of 8-bit floats, whose bits travel unchanged.

    A pool of another type uses the other's scales.
    """
    if not prefill.pool_dtype is decode.pool_dtype is DType.FLOAT8_E4M3:
        return []
    return [
        f"kv_scales[{layer}]: {prefill.scales_of(layer)} != {decode.scales_of(layer)}"
        for layer in range(prefill.layout.num_layers)
        if prefill.scales_of(layer) != decode.scales_of(layer)
    ]


def check_id(name: str, value: int) -> None:
    """Raise LayoutError if `value` cannot be the id of a life or a session: it must be in [1, 2**64)."""
    if not 0 < value < 1 << 64:
        raise LayoutError(f"{name} is {value}; it must be in [1, 2**64)")


def _check_rank(name: str, rank: int, instance: Instance) -> None:
    if not 0 <= rank < instance.shard.num_ranks:
        raise LayoutError(f"{name} is {rank}; the instance has {instance.shard.num_ranks} ranks")


def _shown(values: tuple[object, ...]) -> str:
    """Return a peer's list, short enough for a log line."""
    text = str(values)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(values)} entries)"


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
