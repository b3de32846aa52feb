"""The instance that a rank describes, and settings that are refused before a rank starts."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvferry.demo.kinds import ModelKind
from kvferry.demo.model import make_demo_model
from node_runtime.rank_setup import check_before_start, open_transport, own_instance
from tests.runtime.instances import LAYOUT
from transfer.config import DecodeNodeConfig, NodeServerConfig, PrefillNodeConfig, TransportConfig
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3
from transfer.errors import ConfigError
from transfer.instance import CAPABILITIES, check_compatible
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
    assert {
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
    } == CAPABILITIES


class ScaledEngine(NoEngine):
    kv_scales = ((2, 0.5), (0.25, 1))


def test_scales_are_taken_from_an_engine_that_has_some() -> None:
    transport = InprocTransport(InprocHub())
    engine = ScaledEngine(shard=Shard(dtype=DType.FLOAT8_E4M3))
    assert own_instance(engine, transport, incarnation=1, device_type="cpu").kv_scales == ((2.0, 0.5), (0.25, 1.0))
    assert own_instance(NoEngine(), transport, incarnation=1, device_type="cpu").kv_scales == ()


def test_a_rank_can_compute_the_digests_of_its_device() -> None:
    """Between host memory and a GPU, both use the GPU's digest."""
    transport = InprocTransport(InprocHub())
    host, gpu = (own_instance(NoEngine(), transport, incarnation=1, device_type=kind) for kind in ("cpu", "cuda"))
    assert check_compatible(host, host).digest == DIGEST_XXH3
    assert {check_compatible(*pair).digest for pair in ((gpu, gpu), (gpu, host), (host, gpu))} == {DIGEST_WORDS}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_demo_model(tmp_path / "model", seed=0)


def config(model: Path, **transport: object) -> PrefillNodeConfig:
    return PrefillNodeConfig(model=model, transport=TransportConfig.model_validate(transport))


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(ConfigError, match="device is cuda, and this machine has no NVIDIA device"):
        check_before_start(PrefillNodeConfig(model=model, device="cuda"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("inproc", "transport.name is inproc, which joins two ends of one process"),
        ("cuda_ipc", "transport.name is cuda_ipc, which joins GPUs, and device is cpu: choose ucx or nixl"),
    ],
)
def test_transports_that_cannot_serve_are_refused(model: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_before_start(config(model, name=name))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ucx", "ucxx is not installed"),
        ("nixl", "nixl_cu13 or nixl_cu12 is not installed: pip install"),
        ("auto", "transport.name is auto, and no transport is installed: pip install 'kvferry[ucx-cu13]' (or ucx-cu12) or 'kvf"),
    ],
)
def test_a_library_that_is_missing_is_named(model: Path, name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    elsewhere = config(model, name=name).model_copy(update={"server": NodeServerConfig(host="10.1.2.3")})
    with pytest.raises(ConfigError, match=re.escape(missing)):
        check_before_start(elsewhere)


def test_within_one_machine_auto_needs_no_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a bare `pip install kvferry` can start its default transport."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    check_before_start(config(model, name="auto"))


def test_speculative_decoding_of_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    """Also by `--check-config`, which starts nothing."""
    recurrent = make_demo_model(tmp_path / "model", kind=ModelKind.HYBRID)
    settings = {"model": recurrent, "tls": {"insecure": 1}}
    check_before_start(DecodeNodeConfig.model_validate(settings))
    with pytest.raises(ConfigError, match=r"speculative\.method is set, and a Qwen3NextForCausalLM has recurrent layers"):
        check_before_start(DecodeNodeConfig.model_validate(settings | {"speculative": {"method": "ngram"}}))


@pytest.mark.parametrize("name", ["shm", "ucx", "nixl"])
def test_the_configured_transport_is_opened(model: Path, name: str) -> None:
    transport = open_transport(config(model, name=name).transport, host="127.0.0.1")
    assert transport.name == name
    transport.close()


def test_without_rdma_a_cpu_rank_opens_shm_and_ucx_or_else_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.transport.nixl_library.RDMA_DEVICES", tmp_path)
    transport = open_transport(TransportConfig(), host="127.0.0.1")
    assert transport.names == ("shm", "ucx"), "an agent of nixl takes time, and ucx is faster without RDMA"
    transport.close()
    has_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "ucxx" else has_spec(module))
    transport = open_transport(TransportConfig(), host="127.0.0.1")
    assert transport.names == ("shm", "nixl")
    transport.close()


@pytest.mark.parametrize(("lane", "names"), [("shm", ("shm", "ucx")), ("net", ("ucx",))])
def test_a_fixed_lane_leaves_out_transports_of_another_kind(
    lane: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shm` leaves out those that could use the network, and `net` those that never use it."""
    monkeypatch.setattr("transfer.transport.nixl_library.RDMA_DEVICES", tmp_path)
    config = TransportConfig.model_validate({"ucx": {"lane": lane}})
    transport = open_transport(config, host="127.0.0.1")
    assert transport.names == names
    transport.close()


def test_shm_is_refused_for_a_pool_on_a_gpu(model: Path) -> None:
    with pytest.raises(ConfigError, match="transport shm joins pools in host memory, and the pool is on a GPU: choose auto"):
        open_transport(config(model, name="shm").transport, host="127.0.0.1", device_index=0)
