"""Writes down what a running vLLM tells a connector about its KV cache, for tests that run without vLLM.

Run it where vLLM is installed (its CPU wheel is enough), with kvferry's own dependencies beside it, from the repository's root::

    python tests/adapters/record_vllm.py [CASE ...]

Each case makes a tiny model with random weights, starts vLLM on it in a process of its own, and writes
tests/adapters/recorded/vllm-VERSION-CASE.json. In it are for each rank the facts that
`kvferry.engines.vllm_facts.read_facts` read on the worker, with type, shape, strides and offset of each tensor that was
registered; the facts as the scheduler read them, with the KV cache groups as vLLM prints them; what `model_fields` says of the
model; and, where a prompt was computed, one block of one layer and head as it lay in memory, beside K and V of its tokens as
transformers computes them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
}
PROMPT = [3 + 7 * i % 200 for i in range(70)]
LAYER, HEAD, BLOCK = 1, 2, 1  # what is looked at of the prompt's KV

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 4, "head_dim": 64,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 64, "num_hidden_layers": 6, "num_key_value_heads": 2}
CHUNKS: dict[str, Any] = {
    "attention_chunk_size": 64, "interleave_moe_layer_step": 5, "intermediate_size_mlp": 64, "num_key_value_heads": 2,
}  # fmt: skip
SINKS: dict[str, Any] = {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
WIDE_HEADS: dict[str, Any] = {"global_head_dim": 64, "hidden_size_per_layer_input": 0}
STATES: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_key_value_heads": 2,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 64, "hidden_size": 128, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16,
    "num_key_value_heads": 2, "mamba_chunk_size": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the settings of vLLM with it.

    Args:
        kind: Model class of transformers, without "ForCausalLM".
        draft: Method of speculative decoding, with a draft model of random weights: "eagle3" or "mtp".
        sizes: Of its configuration, besides `SIZES`.
        settings: Of ``vllm.LLM``.
        connector: Class of recording_connector.py.
    """

    kind: str = "Llama"
    draft: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    connector: str = "RecordingConnector"
    has_prompt: bool = False


TP2: dict[str, Any] = {"tensor_parallel_size": 2}
GROUPS = "RecordingConnectorOfGroups"
CASES = {
    "llama-block32": Case(settings={"block_size": 32}, has_prompt=True),
    "llama-block128": Case(settings={"block_size": 128}),
    "llama-tp2-block32": Case(settings={**TP2, "block_size": 32}),
    "llama-tp2-block128": Case(settings={**TP2, "block_size": 128}),
    "llama-tp2-one-head": Case(sizes={"num_key_value_heads": 1}, settings={**TP2, "block_size": 32}),
    "llama-pp2": Case(settings={"pipeline_parallel_size": 2, "block_size": 32}),
    "llama-head80-bfloat16": Case(sizes={"head_dim": 80}, settings={"block_size": 32, "dtype": "bfloat16"}),
    "llama-kv-bfloat16": Case(settings={"block_size": 32, "kv_cache_dtype": "bfloat16"}),
    "llama-fp8": Case(settings={"block_size": 32, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    "qwen3-block128": Case(kind="Qwen3", sizes={"num_key_value_heads": 2}, settings={"block_size": 128}),
    "mla": Case(kind="DeepseekV3", sizes=LATENT),
    "mla-tp2": Case(kind="DeepseekV3", sizes=LATENT, settings=TP2),
    "llama-eagle3": Case(draft="eagle3", sizes={"num_key_value_heads": 2}, settings={"block_size": 32}),
    "mla-mtp-tp2": Case(draft="mtp", kind="DeepseekV3", sizes=LATENT, settings=TP2),
    "gemma3": Case(kind="Gemma3", sizes=WINDOWS, settings={"block_size": 32}),
    "gemma3-tp2": Case(kind="Gemma3", sizes=WINDOWS, settings={**TP2, "block_size": 32}),
    "gemma3-groups": Case(kind="Gemma3", sizes=WINDOWS, settings={"block_size": 32}, connector=GROUPS),
    "gemma4-groups": Case(kind="Gemma4", sizes=WINDOWS | WIDE_HEADS, settings={"block_size": 32}, connector=GROUPS),
    "gpt-oss-groups": Case(kind="GptOss", sizes=SINKS, settings={"block_size": 32}, connector=GROUPS),
    "llama4-groups": Case(kind="Llama4", sizes=CHUNKS, settings={"block_size": 32}, connector=GROUPS),
    "mistral-window": Case(kind="Mistral", sizes={"sliding_window": 64}, settings={"block_size": 32}),
    "mistral-window-groups": Case(kind="Mistral", sizes={"sliding_window": 64}, settings={"block_size": 32}, connector=GROUPS),
    "qwen3-next": Case(kind="Qwen3Next", sizes=STATES, connector=GROUPS),
    "qwen3-next-tp2": Case(kind="Qwen3Next", sizes=STATES, settings=TP2, connector=GROUPS),
    "granite4": Case(kind="GraniteMoeHybrid", sizes=MAMBA2, connector=GROUPS),
    "granite4-tp2": Case(kind="GraniteMoeHybrid", sizes=MAMBA2, settings=TP2, connector=GROUPS),
}


def make_model(case: Case, directory: Path) -> None:
    import torch
    import transformers

    text = "Text" if case.kind.startswith(("Gemma", "Llama4")) else ""
    config = getattr(transformers, f"{case.kind}{text}Config")(**{**SIZES, **case.sizes})
    torch.manual_seed(1234)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).float().eval()
    model.save_pretrained(directory)


def speculative(case: Case, model: Path) -> dict[str, Any] | None:
    """Make the draft model; return the settings of vLLM with it."""
    from tests.vllm.drafts import add_mtp_layer, make_eagle3

    if case.draft == "eagle3":
        return {"method": "eagle3", "model": str(make_eagle3(model.with_name("draft"), model)), "num_speculative_tokens": 2}
    if case.draft == "mtp":
        add_mtp_layer(model)
        return {"method": "mtp", "num_speculative_tokens": 1}
    return None


def record(name: str, target: Path) -> None:
    """One case, in this process."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        os.environ["KVFERRY_RECORD_DIRECTORY"] = str(place)
        make_model(case, place / "model")
        found = {"case": name, "vllm": vllm_version(), "model_config": json.loads((place / "model/config.json").read_text())}
        found |= run(case, place)
        for path in sorted(place.glob("*.json")):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    lines = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda inner: " ".join(inner[0].split()), json.dumps(found, indent=1))
    target.write_text(lines + "\n", encoding="utf-8")


def run(case: Case, place: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from kvferry.engines.vllm_facts import model_fields

    transfer = {"kv_connector": case.connector, "kv_connector_module_path": "recording_connector", "kv_role": "kv_both"}
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 23} | case.settings
    llm = LLM(
        model=str(place / "model"),
        speculative_config=speculative(case, place / "model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=2,
        kv_transfer_config=transfer,
        **settings,
    )
    found: dict[str, Any] = {"settings": settings, "model_fields": model_fields(llm.llm_engine.vllm_config)}
    if case.has_prompt:
        llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=1, temperature=0, detokenize=False))
        found["prompt"] = look(place / "model")
    return found


def look(model: Path) -> dict[str, Any]:
    """A block of the prompt as vLLM has it, and what transformers says is in it."""
    import torch
    import transformers
    from recording_connector import RecordingConnector

    [caches] = [cache for name, cache in RecordingConnector.caches.items() if f".{LAYER}." in name]
    block_id = RecordingConnector.block_ids[0][BLOCK]
    block_size = caches.shape[2]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        layer = loaded(torch.tensor([PROMPT])).past_key_values.layers[LAYER]
    tokens = slice(BLOCK * block_size, (BLOCK + 1) * block_size)
    return {
        "layer": LAYER,
        "head": HEAD,
        "block": block_id,
        "bytes": _text(caches[block_id, HEAD]),
        "k": _text(layer.keys[0, HEAD, tokens]),
        "v": _text(layer.values[0, HEAD, tokens]),
    }


def _text(values: Any) -> str:
    return base64.b64encode(values.contiguous().view(-1).numpy().tobytes()).decode()


def vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        record(sys.argv[2], Path(sys.argv[3]))
        return
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        target = RECORDED / f"vllm-{vllm_version().rsplit('.', 1)[0]}-{name}.json"
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(target)],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        print(f"{name}: {'recorded' if not done.returncode else 'FAILED'}", flush=True)
        if done.returncode:
            print("\n".join((done.stdout + done.stderr).splitlines()[-30:]))


if __name__ == "__main__":
    main()
