"""The demo's models and prompts, and the single process: kinds, types, limits, and the tokens of the reference."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvferry.demo.command as demo_module
from embedded_engine.loading import load_engine
from embedded_engine.model_files import read_model_files
from kvferry.demo.command import cluster_of, run_demo
from kvferry.demo.kinds import ModelKind, cached_demo_model
from kvferry.demo.model import make_demo_model
from kvferry.demo.options import DemoOptions
from kvferry.demo.prompts import BUILT_IN, check_prompts_fit, chosen_dtype, model_dtype
from kvferry.demo.reference import ReferenceResult, generate_all
from tests.embedded_engine import steps
from tests.runtime.instances import prefill_config
from transfer.errors import ConfigError
from transfer.layout import DType, Shard

CONTEXT = 4096  # tokens, of the demo model
NUM_TOKENS = 10
PROMPTS = BUILT_IN[:6]


# Kinds. tests/cluster/long tests whether every part of their KV matters.


@pytest.mark.parametrize("kind", [ModelKind.SLIDING, ModelKind.MLA, ModelKind.HYBRID])
def test_tensor_parallel_degrees_that_divide(tmp_path: Path, kind: ModelKind) -> None:
    files = read_model_files(make_demo_model(tmp_path / kind, kind=kind))
    for tp_size in (1, 2, 3, 4, 6, 12):
        files.check_shard(Shard(tp_size=tp_size))


def test_a_kind_is_the_same_every_time_and_another_for_another_seed(tmp_path: Path) -> None:
    """The hybrid has every way in which weights are made."""
    first = make_demo_model(tmp_path / "first", kind=ModelKind.HYBRID)
    before = torch.random.get_rng_state()
    again = make_demo_model(tmp_path / "again", kind=ModelKind.HYBRID)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"
    names = sorted(path.name for path in first.iterdir())
    assert all((again / name).read_bytes() == (first / name).read_bytes() for name in names)
    make_demo_model(again, kind=ModelKind.HYBRID, seed=1)
    assert (again / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_every_kind_has_a_directory_of_its_own_between_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    async def make(command: list[str]) -> None:
        made.append(command[command.index("--kind") + 1])
        Path(command[-1]).mkdir()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = [asyncio.run(cached_demo_model(kind, run=make)) for kind in (*ModelKind, *ModelKind)]
    assert made == list(ModelKind) and len(set(found)) == len(ModelKind)


# Options


def test_kind_and_directory_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model-kind is mla; it applies to the generated model"):
        DemoOptions(model=tmp_path, model_kind=ModelKind.MLA)


@pytest.mark.parametrize("max_new_tokens", [4090, 5000])
async def test_a_request_beyond_the_context_is_refused_before_anything_starts(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, max_new_tokens: int
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(demo_module, "LocalCluster", started)
    monkeypatch.setattr(demo_module, "ReferenceRun", started)
    needed = f"--max-new-tokens is {max_new_tokens}, together {max_new_tokens + 14}; the model's context is {CONTEXT} tokens"
    with pytest.raises(ConfigError, match=f"^prompt 2 has 14 tokens and {needed}$"):
        await run_demo(DemoOptions(model=demo_dir, max_new_tokens=max_new_tokens, num_requests=2))


async def test_a_prompt_is_accepted_up_to_the_context_length(demo_dir: Path) -> None:
    await check_prompts_fit(demo_dir, BUILT_IN[:1], 1)
    with pytest.raises(ConfigError, match=r"prompt 1 has (\d+) tokens") as refused:
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT)
    prompt_tokens = int(str(refused.value).split()[3])
    await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens)
    with pytest.raises(ConfigError):
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens + 1)


@pytest.fixture(scope="module")
def bfloat16_dir(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.bfloat16, local_files_only=True)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(demo_dir, local_files_only=True).save_pretrained(directory)
    return directory


def test_both_nodes_get_the_same_dtype(bfloat16_dir: Path, demo_dir: Path) -> None:
    for model, option, dtype in (
        (bfloat16_dir, "float32", "float32"),
        (bfloat16_dir, "model", "bfloat16"),
        (demo_dir, "float32", "float32"),
    ):
        cluster = cluster_of(DemoOptions(model=model, dtype=option), model, 1)
        assert {cluster.settings_of(role)["dtype"] for role in ("prefill", "decode")} == {dtype}
    with pytest.raises(ConfigError, match="--dtype is float64; it must be float32 or model"):
        DemoOptions(dtype="float64")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, None),
        ({}, None),
    ],
)
def test_the_models_own_dtype_is_what_its_configuration_names(tmp_path: Path, config: dict[str, str], dtype: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_dtype(tmp_path) == chosen_dtype("model", tmp_path) == dtype
    assert chosen_dtype("float32", tmp_path) == "float32"


# The reference


def test_engine_and_reference_agree_in_float32_token_for_token(bfloat16_dir: Path, tmp_path: Path) -> None:
    results = list(generate_all(bfloat16_dir, PROMPTS, NUM_TOKENS, dtype="float32"))
    narrow = list(generate_all(bfloat16_dir, PROMPTS, NUM_TOKENS, dtype="bfloat16"))
    assert narrow != results, "no token depends on the dtype: this test can say nothing"
    tokenizer: Any = AutoTokenizer.from_pretrained(bfloat16_dir, local_files_only=True)
    tokens = {str(number): tuple(tokenizer(prompt).input_ids) for number, prompt in enumerate(PROMPTS)}
    engine = load_engine(
        prefill_config(bfloat16_dir, dtype="float32", pool={"num_tokens": 4096}), rank=0, rendezvous=tmp_path / "unused"
    )
    try:
        assert engine.layout.dtype is DType.FLOAT32
        generated = steps.generate_all(engine, tokens, NUM_TOKENS)
    finally:
        engine.close()
    assert [tuple(generated[str(number)]) for number in range(len(PROMPTS))] == [result.token_ids for result in results]


TEXTS = ("The captain counts the crates.", "Far away a bell rings seven times. " * 6)


def greedy_without_cache(model: Any, tokenizer: Any, prompt: str) -> ReferenceResult:
    ids: list[int] = tokenizer(prompt).input_ids
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(12):
            logits = model(torch.tensor([ids + tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return ReferenceResult(prompt_tokens=len(ids), token_ids=tuple(tokens))


def test_the_reference_is_greedy_over_the_whole_context(demo_dir: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, local_files_only=True).eval()
    found = list(generate_all(demo_dir, TEXTS, 12, dtype="float32"))
    assert found == [greedy_without_cache(model, tokenizer, prompt) for prompt in TEXTS]
    assert tokenizer.bos_token_id == 0  # it has the id of padding here: a mask guessed from ids would hide it
