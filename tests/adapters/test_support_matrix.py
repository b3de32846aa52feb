"""The tables of supported models and features name what the code of the adapters accepts, and only that."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvferry.engines.sglang_layout import MOVABLE_DTYPES, MOVABLE_POOLS, read_pool
from kvferry.engines.vllm_facts import INDEXER_ROWS, ROW_FORMATS, read_facts
from kvferry.engines.vllm_layout import DENSE_BACKENDS, LATENT_BACKENDS, PACKED_BACKENDS, describe
from tests.adapters.test_sglang_layout import cut, pool_of
from tests.adapters.test_vllm_facts import attention_spec, config, groups
from tests.adapters.vllm_memory import facts_of, ranks, recorded, sparse_layers
from transfer.errors import TransferError

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"`([^`]+)`")
Probe = Callable[[], object]


def rows(document: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of the first table below a heading, by the text of their first cell."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    section = text[text.index(f"## {heading}\n") :]
    table = re.findall(r"^\|(.+)\|$", section[: section.find("\n## ", 1)], re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in table]
    return {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first): rest for first, *rest in cells if set(first) - set("-")}


def codes(cell: str) -> set[str]:
    return set(CODE.findall(cell))


def refused_settings() -> set[str]:
    """Return the settings of SGLang that `sglang_classes`, which imports SGLang, refuses by name."""
    module = ast.parse((ROOT / "kvferry" / "engines" / "sglang_classes.py").read_text(encoding="utf-8"))
    (check,) = (one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == "_check_supported")
    (loop,) = (one for one in check.body if isinstance(one, ast.For))
    assert isinstance(loop.iter, ast.Tuple)
    names = [ast.literal_eval(one.elts[0]) for one in loop.iter.elts if isinstance(one, ast.Tuple)]
    return {str(name).split()[0] for name in names}


def of_vllm(*cases: str) -> list[Probe]:
    return [lambda case=case: [describe(facts_of(rank["facts"])) for rank in ranks(recorded(case))] for case in cases]


def sparse() -> object:
    layers = sparse_layers(4, block_size=64)
    return describe(facts_of(recorded("mla")["rank0"]["facts"], layers=tuple(layers), model_layers=()))


def of_setting(**changes: Mapping[str, object]) -> Probe:
    return lambda: describe(read_facts(config(**changes), groups(attention_spec())))


def of_sglang(*names: str, **changes: object) -> list[Probe]:
    return [lambda name=name: read_pool(pool_of(name), cut(dtype="bfloat16", **changes)) for name in names]


def stage_of_prefill() -> object:
    stage = cut(num_layers=8, pp_size=2, pp_rank=1)
    return read_pool(pool_of("mha_stage"), stage, gather_stages=lambda own: [own, own])


def draft() -> object:
    return read_pool(pool_of("mha"), cut(draft_kv_heads=2), draft_pool=pool_of("draft"))


def context_parallelism() -> None:
    if {"attn_cp_size", "dcp_size"} <= refused_settings():
        raise TransferError("refused by name")


PROBES: dict[str, tuple[list[Probe], list[Probe]]] = {
    "full attention, GQA, MLA": (of_vllm("llama-block32", "mla"), of_sglang("mha", "mla")),
    "sliding windows": (of_vllm("gemma3-groups", "mistral-window-groups"), of_sglang("swa", window_tokens=40)),
    "chunked local attention (Llama 4)": (of_vllm("llama-block32"), of_sglang("swa", window_tokens=40)),
    "recurrent states (Mamba, gated delta nets, KDA)": (
        of_vllm("granite4", "qwen3-next"),
        [*of_sglang("hybrid_gdn", "hybrid_mamba2"), *of_sglang("hybrid_kda", tp_size=2, num_kv_heads=8)],
    ),
    "sparse attention indexers (DeepSeek V3.2, GLM-5)": ([sparse], of_sglang("dsa", "dsa_packed")),
    "draft layers": (of_vllm("llama-eagle3", "mla-mtp-tp2"), [draft]),
    "LoRA adapters": ([of_setting()], []),
    "context parallelism": (
        [of_setting(parallel_config={f"{side}_context_parallel_size": 2}) for side in ("decode", "prefill")],
        [context_parallelism],
    ),
    "data-parallel ranks": ([], []),
    "pipeline parallelism": (of_vllm("llama-pp2"), [stage_of_prefill]),
    "fp8 KV": (of_vllm("llama-fp8"), of_sglang("mha_float8", "mla_float8")),
}
"""For each row, code that accepts or refuses it, of vLLM and of SGLang."""


def test_each_row_of_the_matrix_has_code() -> None:
    assert set(rows("support.md", "Models and features in vLLM and SGLang")) - {""} == set(PROBES)


@pytest.mark.parametrize("row", PROBES)
def test_the_matrix_says_what_the_code_does(row: str) -> None:
    cells = rows("support.md", "Models and features in vLLM and SGLang")[row]
    for cell, probes in zip(cells, PROBES[row], strict=False):
        for probe in probes:
            if cell.startswith(("refused", "no")):
                with pytest.raises(TransferError):
                    probe()
            else:
                probe()


def test_backends_of_vllm() -> None:
    assert set().union(*map(codes, rows("vllm.md", "What is supported")["backends"])) == {
        *PACKED_BACKENDS, *DENSE_BACKENDS, *LATENT_BACKENDS,
    }  # fmt: skip


def test_row_formats_of_vllm() -> None:
    named = set().union(*(codes(first) for first in rows("vllm.md", "What is supported")))
    assert named & {*ROW_FORMATS} == {*ROW_FORMATS} - {INDEXER_ROWS}


def test_methods_of_speculative_decoding_in_vllm() -> None:
    refused = read_facts(config(speculative_config={"method": "unknown"}), groups(attention_spec()))
    known = refused.features["speculative decoding"].removeprefix("unknown; use ").split(", ")
    assert set().union(*map(codes, rows("vllm.md", "What is supported")["speculative decoding"])) == set(known)


def test_pools_of_sglang() -> None:
    table = rows("sglang.md", "What is supported")
    accepted = {name for row in table.values() for name in codes(row[0]) if name.endswith("Pool")}
    assert accepted == set(MOVABLE_POOLS)
    assert {str(dtype) for dtype in MOVABLE_DTYPES} == {
        name.replace("fp8_e4m3", "float8_e4m3fn") for name in re.findall(r"\b(?:b?float\d+|fp8_e4m3)\b", table["KV dtype"][0])
    }


def test_settings_of_sglang_that_are_refused() -> None:
    table = rows("sglang.md", "What is supported")
    named = [codes(cells[0]) for first, cells in table.items() if first.startswith("refused at start, setting named")]
    assert set().union(*named) == refused_settings()
