"""`kvferry plan`: quick and without torch, readable without colour, exact as JSON, one line where something is wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvferry.__main__ import app
from kvferry.plan import device as plan_device
from kvferry.plan.device import Device, detect_device
from kvferry.plan.options import PlanOptions, inputs_for, make_plan_for
from planner.device_defaults import with_gpu_defaults
from planner.model_directory import read_model_directory
from planner.node_plan import DeviceMemory, node_plan_inputs
from planner.plan import make_plan
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.layout import Shard

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "unit" / "configs"
MEMORY_PAGE = ROOT / "docs" / "memory.md"
MIB, GIB = 1 << 20, 1 << 30


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
    assert (content["max_total_tokens"], content["static_fraction"]) == (441_136, 0.875)
    assert sum(line["bytes"] for line in content["lines"] if not line["inside"]) == content["device_bytes"] == 80 * GIB


def test_every_flag_reaches_the_plan(models: Path) -> None:
    flags = (
        "--device-memory 100GB --free-memory 90GB --role prefill --tp 8 --pp 2 --dp 2 --dp-attention --dtype float16 "
        "--kv-dtype int8 --page-size 32 --chunked-prefill-size 4096 --max-running-requests 7 --max-seq-len 5000 "
        "--speculative eagle --policy page-count --memory-ratio 0.8 --max-total-tokens 1000 "
        "--staging 1MiB --weights 3GB --sparse-policy xattention --sparse-stride 8 --workspace-strategy lazy --chunk-tokens 512"
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
    flags = (
        "--device-memory 200GB --role decode --ring 2MiB --cuda-graph-bs 1,2,40 --enable-torch-compile --torch-compile-max-bs 16"
    )
    decode = json.loads(plan("--model", "llama-3-70b", "--json", *flags.split()).stdout)
    assert (decode["role"], decode["ring_bytes"], decode["tokens_in_flight"]) == ("decode", 2 << 20, 2)
    assert (decode["torch_compile_max_bs"], content["torch_compile_max_bs"]) == (16, 0)
    assert next(line["bytes"] for line in decode["lines"] if line["name"] == "inductor") == 2 * 16 << 20
    assert decode["cuda_graph_max_bs"] == 40 and decode["page_table_bytes"] > 0 == content["page_table_bytes"]
    flags = "--device-memory 200GB --role prefill --sparse-policy xattention --kv-offload --static-fraction 0.9"
    offloaded = json.loads(plan("--model", "llama-3-70b", "--json", *flags.split()).stdout)
    assert [one["allocated"] for one in offloaded["workspaces"]] == [True] * 4
    assert next(line["bytes"] for line in offloaded["lines"] if line["name"] == "offload") == 128 << 20
    assert (offloaded["cuda_graph_max_bs"], offloaded["static_fraction"]) == (0, 0.9)


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


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("dp_attention=true,dp=2,tp=2", PlanOptions(dp_attention=True, dp=2, tp=2)),
        ("max_seq_len=none,dtype=auto,ring=1GiB", PlanOptions(ring="1GiB")),
    ],
)
def test_changes_are_read_by_the_names_of_flags(text: str, changed: PlanOptions) -> None:
    assert PlanOptions(max_seq_len=None).changed(text) == changed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "nowhere"), 2, "model is 'nowhere', which is not a directory"),
        (("--device-memory", "80GX"), 2, "--device-memory is '80GX'; it must be a size"),
        (("--policy", "x"), 2, "--policy is 'x'; it must be one of static-fraction, page-count"),
        (("--staging", "1MiB", "--role", "decode"), 2, "--staging is given and --role is decode; only a prefill node has it"),
        (("--device-memory", "80"), 2, "--device-memory is 80, which is 80 bytes; did you mean 80GiB? (bytes: 80B)"),
        (("--cuda-graph-bs", "1,x"), 2, "--cuda-graph-bs is '1,x'; it must be batch sizes"),
        (("--compare", "tp:4"), 2, "--compare has 'tp:4'; did you mean tp=4?"),
        (("--compare", "tpp=4"), 2, "--compare has 'tpp=4'; it must be name=value, with a name of role, "),
        (("--device-memory", "16GiB"), 8, "no page of KV fits: of 16.0 GiB the largest terms are weights 15.3 GiB"),
        (("--png", "plan.jpg"), 2, "--png is plan.jpg; its name must end in .png"),
        (("--png", "/nowhere/plan.png"), 2, "--png is /nowhere/plan.png; it cannot be written: No such file or directory"),
    ],
)
def test_each_problem_of_a_plan_is_reported_in_one_line(
    models: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = plan("--model", "qwen3-8b", "--device-memory", "24GiB", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"kvferry plan: {message}") and result.stderr.count("\n") == 1


def test_a_model_that_does_not_say_its_dtype_asks_for_it(models: Path) -> None:
    flags = ("--model", "gpt-oss-20b", "--device-memory", "24GiB")
    assert "set --dtype to one of float32, bfloat16, float16\n" in plan(*flags).stderr
    assert plan(*flags, "--dtype", "bfloat16").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--model", "qwen3-8b"), None),
        (
            ("--model", "qwen3-8b", "--tp", "3"),
            "--tp is 3, which does not divide num_key_value_heads (8) of the model's config.json; it must be one of",
        ),
        (("--model", "llama-3-70b", "--pp", "2"), "it is sharded by --tp alone"),
        (("--model", "qwen3-8b", "--kv-dtype", "int8"), "its pool must have a floating point dtype"),
        (("--model", "qwen3-8b", "--kv-offload", "--role", "prefill"), None),
        (("--model", "windows", "--kv-offload"), "it offloads full attention only, and the model has none"),
        (("--model", "qwen3-8b", "--speculative", "ngram"), None),
        (("--model", "qwen3-8b", "--speculative", "standalone"), None),
        (
            ("--model", "gpt-oss-20b", "--dtype", "bfloat16", "--tp", "2"),
            "its weights must be plain ones, not quantised; --tp is 2; it must be 1",
        ),
    ],
)
def test_what_the_embedded_engine_would_refuse_is_said(models: Path, arguments: tuple[str, ...], advice: str | None) -> None:
    config = json.loads((models / "qwen3-8b" / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]
    (models / "windows").mkdir()
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    (models / "windows" / "config.json").write_text(json.dumps(config | windows), encoding="utf-8")
    (models / "unnamed").mkdir()
    (models / "unnamed" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = plan(*arguments, "--device-memory", "200GiB", "--json")
    said = [line for line in json.loads(result.stdout)["advice"] if line.startswith("the embedded engine would refuse")]
    if advice is None:
        assert said == []
    else:
        assert len(said) == 1 and advice in said[0]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--model", "qwen3-8b", "--kv-offload", "--tp", "2", "--kv-dtype", "float8_e4m3fn", "--policy", "page-count"), []),
        (("--model", "qwen3-8b", "--tp", "2", "--dp", "2", "--dp-attention"), ["--dp-attention"]),
        (("--model", "qwen3-8b", "--speculative", "ngram"), []),
        (("--model", "qwen3-8b", "--speculative", "standalone"), []),
        (("--model", "qwen3-8b", "--sparse-policy", "xattention", "--role", "prefill"), []),
        (("--model", "gemma-3-27b", "--speculative", "eagle"), ["--speculative", "a vision model"]),
    ],
)
def test_each_option_that_no_engine_here_runs_has_a_line(models: Path, arguments: tuple[str, ...], names: list[str]) -> None:
    advice = json.loads(plan(*arguments, "--device-memory", "200GiB", "--json").stdout)["advice"]
    said = [re.match(r"no engine of this repository runs ([\w -]+): the embedded engine ", line) for line in advice]
    assert [found[1] for found in said if found] == names


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


@pytest.mark.parametrize("compare", [(), ("--compare", "tp=2")])
def test_the_picture_is_a_png(models: Path, compare: tuple[str, ...]) -> None:
    file = models / "plan.png"
    result = plan("--model", "qwen3-8b", "--device-memory", "24GiB", "--png", str(file), *compare)
    assert result.exit_code == 0, result.stderr
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


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


@pytest.mark.parametrize(
    ("model", "tp_size", "gib"), [("qwen3-8b", 1, 24), ("qwen3-8b", 1, 180), ("gemma-3-27b", 2, 80), ("llama-3-70b", 4, 80)]
)
@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        (PrefillNodeConfig, {}),
        (DecodeNodeConfig, {}),
        (PrefillNodeConfig, {"host_ratio": 2}),
        (DecodeNodeConfig, {"host_ratio": 2, "device_window": 4096}),
    ],
)
def test_the_plan_is_that_of_a_node_with_the_same_settings(
    models: Path, kind: type[NodeConfig], offload: dict[str, float], model: str, tp_size: int, gib: int
) -> None:
    """Steps, chunks, running requests and CUDA graphs are not set on either side. Both choose them by the device."""
    directory = read_model_directory(model)
    given = {"model": "m", "device": "cuda", "parallel": {"tp_size": tp_size}, "offload": offload}
    config = with_gpu_defaults(kind.model_validate(given), directory.shape.layout(), device_bytes=gib * GIB)
    shard = Shard(tp_size=tp_size, page_size=config.pool.page_size)
    device = DeviceMemory(total_bytes=gib * GIB, free_bytes=gib * GIB - MIB, is_cpu=False)
    of_node = make_plan(node_plan_inputs(config, directory, shard, device))
    options = PlanOptions(
        role=config.role,
        tp=tp_size,
        kv_offload=bool(offload),
    )
    of_flags = make_plan_for(options, directory, Device(text="", total_bytes=gib * GIB, free_bytes=gib * GIB - MIB))
    assert of_flags.lines == of_node.lines and of_flags.group_pages == of_node.group_pages
