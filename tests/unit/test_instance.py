"""Instances, and whether two of them fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from transfer.chunk import ChunkPlan
from transfer.errors import LayoutError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible, conversion_scales
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard

LLAMA = KVLayout.uniform(num_layers=8, num_kv_heads=12, head_dim=32, dtype=DType.FLOAT32)


FP8 = Shard(tp_size=2, dtype=DType.FLOAT8_E4M3)
SCALES = tuple((0.5 + layer, 2.0 + layer) for layer in range(8))


def instance(**changes: Any) -> Instance:
    values: dict[str, Any] = {
        "incarnation": 1,
        "layout": LLAMA,
        "shard": Shard(tp_size=2),
        "model_fields": {"architecture": "LlamaForCausalLM", "vocab_size": "512"},
        "transport": "ucx",
        "digests": ("xxh3-64",),
        "protocol_versions": (1,),
    }
    return Instance(**values | changes)


def test_cuts_may_differ_and_the_highest_common_version_is_spoken() -> None:
    ours = instance(protocol_versions=(1, 2, 3), capabilities=frozenset({"a"}))
    theirs = instance(shard=Shard(tp_size=4, page_size=32, dtype=DType.BFLOAT16), protocol_versions=(2, 3, 4))
    agreement = check_compatible(ours, theirs)
    assert agreement.protocol_version == 3
    assert check_compatible(theirs, ours) == agreement


@pytest.mark.parametrize(
    ("prefill", "decode", "agreed"),
    [
        (("xxh3-64", "words"), ("xxh3-64", "words"), "xxh3-64"),
        (("xxh3-64", "words"), ("words",), "words"),
        (("words",), ("xxh3-64", "words"), "words"),
        (("words", "xxh3-64"), ("xxh3-64", "words"), "words"),
    ],
)
def test_the_digest_is_the_first_of_prefills_that_decode_has(
    prefill: tuple[str, ...], decode: tuple[str, ...], agreed: str
) -> None:
    assert check_compatible(instance(digests=prefill), instance(digests=decode)).digest == agreed


def test_approximate_attention_needs_a_decode_side_that_names_it_in_keys() -> None:
    """An older one would store such pages where other prefill nodes find them."""
    prefill = instance(attention="xattention threshold=0.9")
    check_compatible(prefill, instance(capabilities=frozenset({"attention_in_keys"})))
    with pytest.raises(LayoutError, match=r"attention: .*xattention threshold=0.9.*the decode side is older than"):
        check_compatible(prefill, instance())
    check_compatible(instance(), instance())


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
def test_decode_context_parallelism_needs_two_sides_that_know_it(prefill: int, decode: int) -> None:
    """A release that does not know it would send or expect every token of a rank's heads."""
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype=DType.FLOAT16)

    def side(dcp_size: int, *capabilities: str) -> Instance:
        shard = Shard(tp_size=2, dcp_size=dcp_size, interleave_tokens=16)
        return instance(layout=layout, shard=shard, capabilities=frozenset(capabilities))

    check_compatible(side(prefill, "token_shards"), side(decode, "token_shards"))
    for known in ((), ("token_shards",)), (("token_shards",), ()):
        sides = side(prefill, *known[0]), side(decode, *known[1])
        is_refused = sides[1].shard.dcp_size > 1 if known[1] else sides[0].shard.dcp_size > 1
        if not is_refused:
            check_compatible(*sides)
            continue
        older = "prefill" if known[1] else "decode"
        with pytest.raises(
            LayoutError, match=rf"dcp_size: {prefill} != {decode} \(the {older} side is older than token_shards\)"
        ):
            check_compatible(*sides)


def test_dcp_sizes_that_do_not_fit_are_named() -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype=DType.FLOAT16)
    prefill, decode = (
        instance(layout=layout, shard=Shard(tp_size=2, dcp_size=size), capabilities=frozenset({"token_shards"}))
        for size in (1, 2)
    )
    with pytest.raises(LayoutError, match=r"dcp_size: 1 != 2 \(the interleave of 1 tokens"):
        check_compatible(prefill, decode)
    with pytest.raises(LayoutError, match="dcp_size is 2; it can be at most 1: layer 0 has 12 KV heads on 2 TP ranks"):
        instance(shard=Shard(tp_size=2, dcp_size=2))


def test_bits_that_travel_as_they_are_need_equal_scales() -> None:
    scaled = instance(shard=FP8, kv_scales=SCALES)
    check_compatible(scaled, instance(shard=Shard(dtype=DType.FLOAT8_E4M3), kv_scales=SCALES))
    check_compatible(instance(shard=FP8), instance(shard=FP8, kv_scales=((1.0, 1.0),) * 8))
    with pytest.raises(LayoutError, match=r"kv_scales\[0\]: \(0.5, 2.0\) != \(1.0, 1.0\); kv_scales\[1\]: \(1.5, 3.0\) != "):
        check_compatible(scaled, instance(shard=FP8))


def test_the_side_that_converts_takes_the_scales_of_the_other() -> None:
    scaled, plain = instance(shard=FP8, kv_scales=SCALES), instance(shard=Shard(dtype=DType.BFLOAT16))
    wanted = {(layer, is_v): SCALES[layer][is_v] for layer in range(8) for is_v in (False, True)}
    check_compatible(scaled, plain)
    check_compatible(plain, scaled)
    assert conversion_scales(plain, scaled) == wanted
    assert conversion_scales(scaled, plain) is None  # its pool has the wire's type: it copies
    assert conversion_scales(scaled, scaled) is None
    assert conversion_scales(plain, instance(shard=FP8)) is None


def test_layers_of_their_own_type_are_not_scaled() -> None:
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=9, v_head_dim=0, dtype=DType.FLOAT32)
    latent = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=576, v_head_dim=0)
    layout = KVLayout(layers=(state, latent), dtype=DType.BFLOAT16)
    scaled = instance(layout=layout, shard=Shard(dtype=DType.FLOAT8_E4M3), kv_scales=((1.0, 1.0), (0.25, 1.0)))
    assert conversion_scales(instance(layout=layout, shard=Shard()), scaled) == {(1, False): 0.25}


def test_a_peers_words_stay_in_one_line() -> None:
    theirs = instance(model_fields={"architecture": "a\nb\u2028c", "new\x0bline": "\x85"}, transport="u\rcx", digests=("x\x1cy",))
    with pytest.raises(LayoutError, match="model architecture: LlamaForCausalLM != a b c") as caught:
        check_compatible(instance(), theirs)
    assert len(str(caught.value).splitlines()) == 1


def test_every_difference_is_named_with_both_values_in_one_line() -> None:
    other = KVLayout.uniform(num_layers=8, num_kv_heads=6, head_dim=32, dtype=DType.BFLOAT16)
    theirs = instance(
        layout=other,
        model_fields={"architecture": "Qwen3ForCausalLM", "vocab_size": "512"},
        transport="inproc",
        digests=("crc", "md"),
        protocol_versions=(2, 3),
    )
    ours = instance()
    with pytest.raises(LayoutError) as caught:
        check_compatible(ours, theirs)
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        f"layout prefill {LLAMA.fingerprint()}, decode {other.fingerprint()}; ",
        f"model prefill {ours.model_fingerprint()}, decode {theirs.model_fingerprint()}; prefill != decode: ",
        "dtype: float32 != bfloat16",
        "layers[0:8]: attention kv_heads=12 k_dim=32 v_dim=32 window=0 != attention kv_heads=6",
        "model architecture: LlamaForCausalLM != Qwen3ForCausalLM",
        "transport: ucx != inproc",
        "digests: xxh3-64 != crc, md",
        "protocol_versions: 1 != 2, 3",
    ):
        assert part in text
    assert "vocab_size" not in text


def test_a_peer_cannot_make_the_list_of_differences_long() -> None:
    """It is logged, once for each try."""
    theirs = instance(model_fields={f"name{number}": "v" * 8000 for number in range(250)})
    with pytest.raises(LayoutError, match=r"\(252 differences in all\)$") as caught:
        check_compatible(instance(), theirs)
    assert "model architecture: LlamaForCausalLM != absent; " in str(caught.value)
    assert len(str(caught.value)) < 4500


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_fields": {"architecture": "LlamaForCausalLM"}}, "model vocab_size: 512 != absent"),
        ({"protocol_versions": (2,)}, "protocol_versions: 1 != 2"),
        ({"shard": Shard(tp_size=2, dtype=DType.INT8)}, "int8"),
    ],
)
def test_one_difference_is_enough_to_refuse(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        check_compatible(instance(), instance(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"incarnation": 0}, "incarnation is 0"),
        ({"transport": ""}, "transport is empty"),
        ({"digests": ()}, "digests is"),
        ({"kv_scales": ((1.0, 1.0),) * 8}, "kv_scales has 8 entries; a pool of float32 has none"),
        ({"shard": FP8, "kv_scales": ((1.0, 1.0),) * 7}, "kv_scales has 7 entries; the model has 8 layers"),
        ({"shard": FP8, "kv_scales": ((1.0, 1.0),) * 7 + ((1.0, 0.0),)}, r"kv_scales\[7\] is \(1.0, 0.0\)"),
        ({"shard": FP8, "kv_scales": ((1.0, 1e-40),) * 8}, r"kv_scales\[0\] is \(1.0, 1e-40\); both must be between"),
        ({"protocol_versions": ()}, "protocol_versions"),
        ({"protocol_versions": (2, 1)}, "ascending"),
        ({"shard": Shard(pp_size=2, stage_layers=(4, 5))}, "add up to 9; the model has 8"),
    ],
)
def test_an_impossible_instance_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        instance(**changes)


def test_attach_values_are_checked() -> None:
    both: dict[str, Any] = {"probe_bytes": 4096, "control_key": bytes(32)}
    asks = AttachRequest(prefill=instance(), prefill_rank=1, offer=b"", chunk_plan=ChunkPlan(chunk_tokens=8), **both)
    with pytest.raises(LayoutError, match="control_key has 31 bytes; it must have 32"):
        replace(asks, control_key=bytes(31))
    with pytest.raises(LayoutError, match="prefill_rank is 2; the instance has 2 ranks"):
        replace(asks, prefill_rank=2)
    with pytest.raises(LayoutError, match="probe_bytes is 0; it must be positive"):
        replace(asks, probe_bytes=0)
    good: dict[str, Any] = {
        "session_id": 1, "decode_rank": 0, "ring_capacity_bytes": 256, "control_address": "tcp://a:1", "heartbeat_s": 0.5,
        "protocol_version": 1, **both,
    }  # fmt: skip
    AttachResponse(decode=instance(), answer=b"", **good)
    for name, wrong in (
        ("session_id", 0),
        ("decode_rank", 2),
        ("ring_capacity_bytes", 257),  # grants of its second round would begin on odd addresses
        ("control_address", ""),
        ("heartbeat_s", float("nan")),
        ("protocol_version", 2),
        ("probe_bytes", 0),
        ("control_key", bytes(31)),
    ):
        with pytest.raises(LayoutError, match=name):
            AttachResponse(decode=instance(), answer=b"", **good | {name: wrong})


@pytest.mark.parametrize("wrong", [{"latency_s": float("nan")}, {"bandwidth_bytes_per_s": -1.0}, {"prefill_rank": -1}])
def test_an_impossible_link_is_refused(wrong: dict[str, Any]) -> None:
    good = Link(prefill_rank=0, decode_rank=0, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    with pytest.raises(LayoutError):
        replace(good, **wrong)
