"""`kvferry plan`: quick and without torch, readable without colour, exact as JSON, one line where something is wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvferry import exit_codes, plan_device
from kvferry.__main__ import app
from kvferry.plan_device import Device, detect_device, given_device
from kvferry.plan_options import PlanOptions, inputs_for, make_plan_for
from kvferry.plan_view import bar, legend, segments, shares
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.layout import Shard
from transfer.memory.model_directory import read_model_directory
from transfer.memory.node_plan import DeviceMemory, node_plan_inputs
from transfer.memory.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "unit" / "configs"
MEMORY_PAGE = ROOT / "docs" / "memory.md"
GIB = 1 << 30


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for each published configuration, and a terminal of 80 columns without colour; no GPU is asked for."""
    for file in CONFIGS.glob("*.json"):
        (tmp_path / file.stem).mkdir()
        shutil.copy(file, tmp_path / file.stem / "config.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(plan_device, "ask_nvidia_smi", lambda: None)
    return tmp_path


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_plan_fits_80_columns_and_reads_without_colour(models: Path) -> None:
    result = plan("--model", "gemma-3-27b", "--device-memory", "80GiB", "--role", "decode", "--ring", "1GiB")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80
    assert "\x1b" not in result.stdout
    for text in (
        "KV, full",
        "KV, window 1024",
        "  CUDA graphs",
        "\nW weights             51.1 GiB  63.9 %",
        "device: 80.0 GiB, as given",
    ):
        assert text in result.stdout


def test_json_is_the_plan(models: Path) -> None:
    result = plan("--model", "llama-3-70b", "--device-memory", "80GiB", "--tp", "4", "--json")
    content = json.loads(result.stdout)
    assert (content["model"], content["device"]) == ("llama-3-70b", "80.0 GiB, as given")
    assert (content["max_total_tokens"], content["static_fraction"]) == (467_600, 0.875)
    assert sum(line["bytes"] for line in content["lines"] if not line["inside"]) == content["device_bytes"] == 80 * GIB


def test_every_flag_reaches_the_plan(models: Path) -> None:
    flags = (
        "--device-memory 100GB --free-memory 90GB --role prefill --tp 8 --pp 2 --dp 2 --dp-attention --dtype float16 "
        "--kv-dtype int8 --page-size 32 --chunked-prefill-size 4096 --max-running-requests 7 --max-seq-len 5000 "
        "--speculative eagle --policy page-count --memory-ratio 0.8 --max-total-tokens 1000 "
        "--staging 1MiB --weights 3GB --sparse-prefill --workspace-strategy lazy --chunk-tokens 512"
    )
    content = json.loads(plan("--model", "llama-3-70b", "--json", *flags.split()).stdout)
    found = {name: content[name] for name in content if name not in ("lines", "groups", "workspaces", "advice", "reserved_bytes")}
    assert found == found | {
        "device_bytes": 10**11, "free_before_bytes": 9 * 10**10, "role": "prefill", "tp_size": 8, "pp_size": 2, "dp_size": 2,
        "page_size": 32, "chunked_prefill_size": 4096, "max_running_requests": 7, "max_seq_len": 5000, "cuda_graph_max_bs": 0,
        "policy": "page-count", "max_total_tokens": 992, "staging_bytes": 1 << 20, "ring_bytes": 0,
        "weights_bytes": 3 * 10**9, "cell_bytes": 2 * 256 * 40 * 1, "tokens_in_flight": 3 * 512,
    }  # fmt: skip
    assert [one["strategy"] for one in content["workspaces"][:2]] == ["lazy", "lazy"]
    flags = "--device-memory 200GB --role decode --ring 2MiB --cuda-graph-bs 1,2,40"
    decode = json.loads(plan("--model", "llama-3-70b", "--json", *flags.split()).stdout)
    assert (decode["role"], decode["ring_bytes"], decode["tokens_in_flight"]) == ("decode", 2 << 20, 1)
    assert decode["cuda_graph_max_bs"] == 40 and decode["page_table_bytes"] > 0 == content["page_table_bytes"]
    flags = "--device-memory 200GB --role prefill --sparse-prefill --kv-offload --static-fraction 0.9"
    offloaded = json.loads(plan("--model", "llama-3-70b", "--json", *flags.split()).stdout)
    assert offloaded["workspaces"][0]["reason"].startswith("not needed: with KV offload")
    assert (offloaded["cuda_graph_max_bs"], offloaded["static_fraction"]) == (0, 0.9)


def test_workspaces_that_are_not_there_are_said(models: Path) -> None:
    sizes = ("--device-memory", "24GiB", "--max-running-requests", "1", "--sparse-prefill")
    flags = ("--model", "glm-4-9b-chat-1m", *sizes, "--role", "prefill")
    lazy = plan(*flags, "--workspace-strategy", "lazy").stdout
    assert "k_expanded  8.0 GiB  allocated on first use" in lazy and "does NOT fit" in lazy
    assert "not allocated at start" not in plan(*flags).stdout
    assert re.search(r"k_expanded +0 B +not needed: with KV offload", plan(*flags, "--kv-offload").stdout)


def test_the_tightest_stage_is_planned_for(models: Path) -> None:
    """Of Gemma-3 27B cut in two, the first stage has the embeddings and the tower: it has the least room."""
    flags = ("--model", "gemma-3-27b", "--device-memory", "80GiB", "--pp", "2")
    inputs = inputs_for(
        PlanOptions(pp=2), read_model_directory("gemma-3-27b"), Device(text="", total_bytes=80 * GIB, free_bytes=None)
    )
    stages = [make_plan(replace(inputs, pp_rank=pp_rank)).max_total_tokens for pp_rank in (0, 1)]
    assert stages[0] < stages[1]
    assert json.loads(plan(*flags, "--json").stdout)["max_total_tokens"] == stages[0]
    assert "pp 2 (stage 0)" in " ".join(plan(*flags).stdout.split())


def test_a_stage_without_layers_that_keep_every_token_sets_no_bound(models: Path) -> None:
    """Of Gemma-3's twelve stages some have windows alone, which hold any number of tokens."""
    flags = ("--model", "gemma-3-27b", "--device-memory", "80GiB", "--pp", "12", "--json")
    content = json.loads(plan(*flags).stdout)
    full = content["groups"][0]
    assert full["kind"] == "full" and full["layers"] and content["cell_bytes"] == full["cell_bytes"] > 0


def test_two_settings_side_by_side(models: Path) -> None:
    flags = ("--model", "llama-3-70b", "--device-memory", "80GiB", "--tp", "4", "--compare", "tp=8, page-size=64")
    text = plan(*flags).stdout
    assert re.search(r"^tokens +467,600 +1,359,360 +\+190\.7 %", text, re.MULTILINE)
    assert re.search(r"^KV, full +35\.7 GiB +51\.9 GiB +\+45\.4 %", text, re.MULTILINE)
    assert text.count("[WWW") == 2 and max(len(line.rstrip()) for line in text.splitlines()) <= 80
    content = json.loads(plan(*flags, "--json").stdout)
    assert (content["plan"]["tp_size"], content["compared"]["tp_size"], content["compared"]["page_size"]) == (4, 8, 64)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("tp=4", PlanOptions(tp=4)),
        ("dp_attention=true,dp=2,tp=2", PlanOptions(dp_attention=True, dp=2, tp=2)),
        ("--static-fraction=0.9", PlanOptions(static_fraction=0.9)),
        ("max_seq_len=none,dtype=auto,ring=1GiB", PlanOptions(ring="1GiB")),
        ("cuda_graph_bs=1 2 4", PlanOptions(cuda_graph_bs="1 2 4")),
    ],
)
def test_changes_are_read_by_the_names_of_flags(text: str, changed: PlanOptions) -> None:
    assert PlanOptions(max_seq_len=None).changed(text) == changed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "nowhere"), 2, "model is 'nowhere', which is not a directory"),
        (("--device-memory", "80GX"), 2, "--device-memory is '80GX'; it must be a size"),
        (("--ring", "-1"), 2, "--ring is '-1'; it must be a size"),
        (("--role", "both"), 2, "--role is 'both'; it must be one of prefill, decode"),
        (("--policy", "x"), 2, "--policy is 'x'; it must be one of static-fraction, page-count"),
        (("--dtype", "int8"), 2, "--dtype is 'int8'; it must be one of float32, bfloat16, float16"),
        (("--kv-dtype", "fp8"), 2, "--kv-dtype is 'fp8'; it must be one of "),
        (("--workspace-strategy", "x"), 2, "--workspace-strategy is 'x'; it must be one of eager, lazy, chunk_bounded"),
        (
            ("--sparse-prefill", "--role", "decode"),
            2,
            "--sparse-prefill is given and --role is decode; only a prefill node has it",
        ),
        (("--staging", "1MiB", "--role", "decode"), 2, "--staging is given and --role is decode; only a prefill node has it"),
        (("--chunk-tokens", "64", "--role", "decode"), 2, "--chunk-tokens is given and --role is decode; only a prefill node"),
        (("--ring", "1MiB", "--role", "prefill"), 2, "--ring is given and --role is prefill; only a decode node has it"),
        (("--chunk-tokens", "0", "--role", "prefill"), 2, "--chunk-tokens is 0; it must be at least 1"),
        (("--device-memory", "80"), 2, "--device-memory is 80, which is 80 bytes; did you mean 80GiB? (bytes: 80B)"),
        (("--device-memory", "81559"), 2, "--device-memory is 81559, which is 81559 bytes; did you mean 81559MiB?"),
        (("--staging", "64"), 2, "--staging is 64, which is 64 bytes; did you mean 64MiB?"),
        (("--device-memory", "80B"), 8, "the device has 0 MB"),
        (("--speculative", "medusa"), 2, "--speculative is 'medusa'; it must be one of eagle, eagle3, nextn, "),
        (("--cuda-graph-bs", "1,x"), 2, "--cuda-graph-bs is '1,x'; it must be batch sizes"),
        (("--cuda-graph-bs", "1", "--cuda-graph-max-bs", "2"), 2, "--cuda-graph-bs and --cuda-graph-max-bs are both given"),
        (("--cuda-graph-max-bs", "-1"), 2, "--cuda-graph-max-bs is -1; it must be at least 0"),
        (("--page-size", "0"), 2, "--page-size is 0; it must be at least 1"),
        (("--compare", "tpp=4"), 2, "--compare has 'tpp=4'; it must be name=value, with a name of role, "),
        (("--compare", "tp"), 2, "--compare has 'tp'; it must be name=value"),
        (("--compare", "tp=x"), 2, "--compare has tp=x; it must be a number"),
        (("--compare", "dp_attention=1"), 2, "--compare has dp_attention=1; it must be true or false"),
        (("--compare", "page_size=0"), 2, "with page_size=0: --page-size is 0"),
        (("--compare", "device_memory=8GiB"), 8, "with device_memory=8GiB: no page of KV fits: of 8.0 GiB the largest terms are"),
        (("--device-memory", "16GiB"), 8, "no page of KV fits: of 16.0 GiB the largest terms are weights 15.3 GiB"),
        (("--pp", "37"), 2, "--pp is 37; a model of 36 layers has at most as many stages"),
        (("--png", "plan.jpg"), 2, "--png is plan.jpg; its name must end in .png"),
        (("--png", "/nowhere/plan.png"), 2, "--png is /nowhere/plan.png; it cannot be written: No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(models: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = plan("--model", "qwen3-8b", "--device-memory", "24GiB", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"kvferry plan: {message}") and result.stderr.count("\n") == 1


def test_a_model_that_does_not_say_its_dtype_asks_for_it(models: Path) -> None:
    flags = ("--model", "gpt-oss-20b", "--device-memory", "24GiB")
    assert "give --dtype, one of float32, bfloat16, float16\n" in plan(*flags).stderr
    assert plan(*flags, "--dtype", "bfloat16").exit_code == 0


def test_chunks_of_a_prompt_decide_on_the_pages_of_windows(models: Path) -> None:
    """3 steps may be in flight, each of one chunk, by default of a node's 128 tokens; a page more may be cut on both sides."""
    flags = ("--model", "gpt-oss-20b", "--dtype", "bfloat16", "--device-memory", "24GiB", "--max-running-requests", "1", "--json")
    prefill = ("--role", "prefill")
    pages = [
        json.loads(plan(*flags, *more).stdout)["groups"][1]["num_pages"]
        for more in (prefill, (*prefill, "--chunk-tokens", "64"), (*prefill, "--chunked-prefill-size", "512"), ())
    ]
    assert pages == [-(-(128 + 3 * tokens - 2) // 16) + 1 for tokens in (128, 64, 128)] + [-(-(128 + 1 - 2) // 16) + 1]
    assert pages == [33, 21, 33, 9]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--model", "qwen3-8b"), None),
        (("--model", "qwen3-8b", "--tp", "2"), None),
        (
            ("--model", "qwen3-8b", "--tp", "3"),
            "--tp is 3, which does not divide the model's num_key_value_heads 8; must be one of",
        ),
        (("--model", "qwen3-8b", "--pp", "2"), "it is cut by --tp alone"),
        (("--model", "qwen3-8b", "--tp", "2", "--dp", "2", "--dp-attention"), "it is cut by --tp alone"),
        (("--model", "gemma-3-27b"), "it does not run Gemma3ForConditionalGeneration"),
        (("--model", "glm-4-9b-chat-1m"), "it does not run ChatGLMModel"),
        (
            ("--model", "gpt-oss-20b", "--dtype", "bfloat16", "--tp", "2"),
            "its weights must be plain ones, not quantised; --tp is 2; must be 1",
        ),
        (("--model", "unnamed"), "config.json names no architecture"),
    ],
)
def test_what_the_embedded_engine_would_refuse_is_said(models: Path, arguments: tuple[str, ...], advice: str | None) -> None:
    config = json.loads((models / "qwen3-8b" / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]
    (models / "unnamed").mkdir()
    (models / "unnamed" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = plan(*arguments, "--device-memory", "200GiB", "--json")
    said = [line for line in json.loads(result.stdout)["advice"] if "embedded engine" in line]
    if advice is None:
        assert said == []
    else:
        assert len(said) == 1 and advice in said[0]


@pytest.mark.parametrize(("vocab_size", "text"), [(100_000, "6.6 million"), (100, "199,456")])
def test_small_models_are_not_counted_in_billions(models: Path, vocab_size: int, text: str) -> None:
    config = json.loads((models / "qwen3-8b" / "config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16 * 11, "vocab_size": vocab_size}
    (models / "qwen3-8b" / "config.json").write_text(json.dumps(config | small), encoding="utf-8")
    result = plan("--model", "qwen3-8b", "--device-memory", "1GiB", "--static-fraction", "0.8")
    assert result.stdout.startswith(f"Qwen3ForCausalLM, {text} parameters; "), result.output


def test_a_detected_device_is_said_where_nothing_fits(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_device, "ask_nvidia_smi", lambda: "NVIDIA T4, 15360, 15000\n")
    result = plan("--model", "qwen3-8b")
    assert result.exit_code == exit_codes.DOES_NOT_FIT
    assert result.stderr.endswith(
        "(device: NVIDIA T4, 15.0 GiB, 14.6 GiB of it free: the least of the 1 emptiest, by nvidia-smi)\n"
    )


def test_the_least_of_the_gpus_counts() -> None:
    answer = "NVIDIA H200, 143771, 143000\nNVIDIA H200, 143771, 142000\nNVIDIA A100-SXM4-80GB MIG 1g.10gb, [N/A], [N/A]\n\n"
    device = detect_device(8, lambda: answer)
    assert (device.total_bytes, device.free_bytes, device.is_cpu) == (143_771 << 20, 142_000 << 20, False)
    assert device.text == "NVIDIA H200, 140.4 GiB, 138.7 GiB of it free: the least of the 2 emptiest, by nvidia-smi"
    assert detect_device(1, lambda: answer).free_bytes == 143_000 << 20, "one rank takes the emptiest"


@pytest.mark.parametrize(
    ("limit", "used", "total", "free"),
    [(None, None, 32 * GIB, 20 * GIB), ("max", "5", 32 * GIB, 20 * GIB), (str(8 * GIB), str(2 * GIB), 8 * GIB, 6 * GIB)],
)
def test_a_host_without_gpus_shares_its_memory(
    tmp_path: Path, limit: str | None, used: str | None, total: int, free: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemFree: 1 kB\nMemAvailable: {20 << 20} kB\nHugePages: 0\n")
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
        (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(used))
    whole, half = (detect_device(ranks, lambda: None, tmp_path) for ranks in (1, 2))
    assert (whole.total_bytes, whole.free_bytes, whole.is_cpu) == (free, free, True), "as a node counts"
    assert (half.total_bytes, half.free_bytes) == (free // 2, free // 2)
    assert half.text.endswith(f"{total // GIB}.0 GiB, shared by 2 ranks") and "what this host has available" in half.text


def test_this_machine_has_a_device() -> None:
    assert detect_device(1).total_bytes


def test_nvidia_smi_that_fails_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert plan_device.ask_nvidia_smi() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    program.chmod(0o755)
    assert plan_device.ask_nvidia_smi() is None
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 143000'\n")
    assert plan_device.ask_nvidia_smi() == "NVIDIA H200, 143771, 143000\n"


def test_given_memory_goes_before_what_is_found() -> None:
    assert given_device(None, None) is None
    sized, free = given_device(80 * GIB, 70 * GIB), given_device(None, 70 * GIB)
    assert sized is not None and sized.text == "80.0 GiB, as given, 70.0 GiB of it free, as given"
    assert free is not None and (free.total_bytes, free.text) == (None, "of unknown size, 70.0 GiB of it free, as given")


def test_the_bar_is_as_wide_as_the_terminal_and_in_proportion(models: Path) -> None:
    directory = read_model_directory(models / "gemma-3-27b")
    made = make_plan_for(PlanOptions(), directory, Device(text="", total_bytes=100 * GIB, free_bytes=90 * GIB))
    for width in (12, 80, 200):
        text = bar(made, width).plain
        assert len(text) == width
        for part in segments(made):
            assert abs(text.count(part.letter) - (width - 2) * part.num_bytes / made.device_bytes) <= 1
    assert sum(part.num_bytes for part in segments(made)) == made.device_bytes
    assert [line.plain[0] for line in legend(made)] == [part.letter for part in segments(made)]
    plain = Console(width=80, no_color=True, force_terminal=False)
    with plain.capture() as captured:
        plain.print(bar(made, 80))
    assert captured.get() == bar(made, 80).plain + "\n"


def test_columns_are_dealt_out_to_the_last() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([999, 1], 10) == [10, 0]


@pytest.mark.parametrize("compare", [(), ("--compare", "tp=2")])
def test_the_picture_is_a_png(models: Path, compare: tuple[str, ...]) -> None:
    file = models / "plan.png"
    result = plan("--model", "qwen3-8b", "--device-memory", "24GiB", "--png", str(file), *compare)
    assert result.exit_code == 0, result.stderr
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_extra_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    result = plan("--model", "qwen3-8b", "--device-memory", "24GiB", "--png", "plan.png")
    assert (result.exit_code, result.stderr) == (2, "kvferry plan: --png needs matplotlib; pip install 'kvferry[plot]'\n")


def shown_commands() -> list[tuple[str, str]]:
    """Each ``kvferry plan`` of the page, and the output that the page shows for it."""
    blocks = re.findall(r"```console\n\$ kvferry (plan [^\n]*)\n(.*?)```", MEMORY_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [(command, output) for command, output in blocks]


@pytest.mark.parametrize(("command", "output"), shown_commands())
def test_the_page_shows_what_the_command_prints(models: Path, command: str, output: str) -> None:
    """Lines that are left out are marked by a line of three dots."""
    result = CliRunner().invoke(app, shlex.split(command))
    printed = "\n".join(line.rstrip() for line in (result.stdout + result.stderr).splitlines()) + "\n"
    for part in re.split(r"^\.\.\.\n", output, flags=re.MULTILINE):
        assert part in printed


def test_the_directory_of_a_demo_model_can_be_planned(demo_dir: Path) -> None:
    flags = ("--device-memory", "1GiB", "--static-fraction", "0.8", "--tp", "4", "--json")
    content: dict[str, Any] = json.loads(plan("--model", str(demo_dir), *flags).stdout)
    size = (demo_dir / "model.safetensors").stat().st_size
    assert content["lines"][1]["formula"].startswith(f"{size:,} B (1 safetensors files) x 0.")
    assert size / 4 < content["weights_bytes"] < size / 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_plan_of_the_flags_is_the_plan_of_a_node_with_those_settings(models: Path, role: str) -> None:
    directory = read_model_directory("gemma-3-27b")
    config: NodeConfig
    if role == "prefill":
        config = PrefillNodeConfig.model_validate({"model": "m", "device": "cuda", "limits": {"max_step_tokens": 4096}})
    else:
        config = DecodeNodeConfig.model_validate({"model": "m", "device": "cuda", "ring": {"capacity_bytes": "1GiB"}})
    shard = Shard(tp_size=2, page_size=config.pool.page_size)
    device = DeviceMemory(total_bytes=80 * GIB, free_bytes=79 * GIB, is_cpu=False)
    of_node = make_plan(node_plan_inputs(config, directory, shard, device))
    common = PlanOptions(role=role, tp=2, max_running_requests=32)
    staging, ring = f"{of_node.inputs.staging_bytes}B", f"{of_node.inputs.ring_bytes}B"
    own = {"chunked_prefill_size": 4096, "staging": staging} if role == "prefill" else {"ring": ring, "cuda_graph_max_bs": 32}
    options = replace(common, **own)  # type: ignore[arg-type]
    of_flags = make_plan_for(options, directory, Device(text="", total_bytes=80 * GIB, free_bytes=79 * GIB))
    assert of_flags.lines == of_node.lines and of_flags.group_pages == of_node.group_pages
