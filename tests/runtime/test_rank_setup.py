"""What a rank says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_setup import own_instance
from tests.runtime.instances import LAYOUT
from transfer.instance import CAPABILITIES, check_compatible
from transfer.kernels.digest import DIGEST_WORDS, DIGEST_XXH3
from transfer.layout import DType, KVLayout, Shard
from transfer.messages import PROTOCOL_VERSION
from transfer.transport.inproc import InprocHub, InprocTransport


@dataclass
class NoEngine:
    layout: KVLayout = LAYOUT
    shard: Shard = field(default_factory=Shard)
    model_fields: dict[str, str] = field(default_factory=dict)


def test_two_ranks_of_this_version_fit_and_tell_every_capability() -> None:
    transport = InprocTransport(InprocHub())
    ours, theirs = (own_instance(NoEngine(), transport, incarnation=life, device_type="cpu") for life in (1, 2))
    assert check_compatible(ours, theirs).protocol_version == PROTOCOL_VERSION
    assert ours.capabilities == theirs.capabilities == CAPABILITIES
    assert {"layer_groups", "resend_once", "selective_release"} == CAPABILITIES


class ScaledEngine(NoEngine):
    kv_scales = ((2, 0.5), (0.25, 1))


def test_scales_are_taken_from_an_engine_that_has_some() -> None:
    transport = InprocTransport(InprocHub())
    engine = ScaledEngine(shard=Shard(dtype=DType.FLOAT8_E4M3))
    assert own_instance(engine, transport, incarnation=1, device_type="cpu").kv_scales == ((2.0, 0.5), (0.25, 1.0))
    assert own_instance(NoEngine(), transport, incarnation=1, device_type="cpu").kv_scales == ()


def test_a_rank_can_compute_the_digests_of_its_device() -> None:
    """Between host memory and a GPU both use what the GPU can."""
    transport = InprocTransport(InprocHub())
    host, gpu = (own_instance(NoEngine(), transport, incarnation=1, device_type=kind) for kind in ("cpu", "cuda"))
    assert check_compatible(host, host).digest == DIGEST_XXH3
    assert {check_compatible(*pair).digest for pair in ((gpu, gpu), (gpu, host), (host, gpu))} == {DIGEST_WORDS}
