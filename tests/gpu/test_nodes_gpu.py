"""Whole nodes on GPUs: the demo's two tiers, KV over every transport, every token compared with a single process on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvferry.local_cluster.spec import child_environment

NUM_GPUS = torch.cuda.device_count()
TIMEOUT_S = 150

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


def run_demo(folder: Path, *options: str, **environment: str) -> dict[str, object]:
    """Its report; fails with its last words when it did not succeed."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "kvferry", "demo", "--device", "cuda", "--json", str(report), *options]
    done = subprocess.run(command, env=child_environment() | environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    content: dict[str, object] = json.loads(report.read_text())
    return content


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


TRANSPORTS = {"ucx": "ucxx", "nixl": "nixl_cu13", "cuda_ipc": "cuda"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_agree_over_every_transport(transport: str, tmp_path: Path) -> None:
    needs(TRANSPORTS[transport])
    run_demo(tmp_path, "--prefill-tp", "1", "--decode-tp", "1", "--transport", transport, "--requests", "6")


@pytest.mark.parametrize("kind", ["sliding", "mla", "hybrid"])
def test_tokens_agree_for_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    run_demo(
        tmp_path, "--prefill-tp", "1", "--decode-tp", "1", "--transport", "cuda_ipc", "--model-kind", kind, "--requests", "4",
        "--decode-order", "HND", "--decode-page-size", "24",
    )  # fmt: skip


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs: this torch sees fewer")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl"])
def test_tokens_agree_across_gpus(transport: str, prefill_tp: int, decode_tp: int, tmp_path: Path) -> None:
    needs(TRANSPORTS[transport])
    run_demo(
        tmp_path, "--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--transport", transport, "--requests", "6"
    )


@pytest.mark.parametrize("options", [["--model-kind", "sliding"], ["--prefill-offload"], ["--offload", "store"]], ids=str)
def test_tokens_agree_where_triton_cannot_compile(options: list[str], tmp_path: Path) -> None:
    """Without a C compiler Triton cannot make its launchers. Copies, page moves and decode steps are then in plain torch."""
    broken = {"CC": "/bin/false", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    code = "import torch; from transfer.copy import kernel_choice; print(kernel_choice.triton_defect(torch.device('cuda', 0)))"
    environment = child_environment() | broken
    probe = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "/bin/false" in probe.stdout, f"Triton works here without a compiler: {probe}"
    options = [str(tmp_path / one) if one == "store" else one for one in options]
    run_demo(tmp_path, "--prefill-tp", "1", "--decode-tp", "1", "--transport", "cuda_ipc", "--requests", "4", *options, **broken)
