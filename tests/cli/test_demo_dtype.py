"""A model stored in bfloat16 is compared in float32: in its own dtype, two correct runs may differ in a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from embedded_engine.loading import load_engine
from kvferry.demo import reference
from kvferry.demo.command import cluster_of
from kvferry.demo.options import DemoOptions
from kvferry.demo.prompts import BUILT_IN, chosen_dtype, model_dtype
from tests.embedded_engine.steps import generate_all
from tests.runtime.instances import prefill_config
from transfer.errors import ConfigError
from transfer.layout import DType

NUM_TOKENS = 10
PROMPTS = BUILT_IN[:6]


@pytest.fixture(scope="module")
def bfloat16_dir(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.bfloat16, local_files_only=True)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(demo_dir, local_files_only=True).save_pretrained(directory)
    return directory


def test_both_nodes_are_told_the_same(bfloat16_dir: Path, demo_dir: Path) -> None:
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


def test_engine_and_reference_agree_in_float32_token_for_token(bfloat16_dir: Path, tmp_path: Path) -> None:
    results = list(reference.generate_all(bfloat16_dir, PROMPTS, NUM_TOKENS, dtype="float32"))
    narrow = list(reference.generate_all(bfloat16_dir, PROMPTS, NUM_TOKENS, dtype="bfloat16"))
    assert narrow != results, "no token depends on the dtype: this test can say nothing"
    tokenizer: Any = AutoTokenizer.from_pretrained(bfloat16_dir, local_files_only=True)
    tokens = {str(number): tuple(tokenizer(prompt).input_ids) for number, prompt in enumerate(PROMPTS)}
    engine = load_engine(
        prefill_config(bfloat16_dir, dtype="float32", pool={"num_tokens": 4096}), rank=0, rendezvous=tmp_path / "unused"
    )
    try:
        assert engine.layout.dtype is DType.FLOAT32
        generated = generate_all(engine, tokens, NUM_TOKENS)
    finally:
        engine.close()
    assert [tuple(generated[str(number)]) for number in range(len(PROMPTS))] == [result.token_ids for result in results]
