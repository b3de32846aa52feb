"""How the servers of these tests are started: vLLM on two CPU cores, or on GPUs if torch finds some, and the router.

Nearly all of a start's 17 to 36 s of processor time are imports, 7 to 8 s in each process. One option that helps is `in_core`
(VLLM_ENABLE_V1_MULTIPROCESSING=0): the worker of a TP 1 server then lives in the engine core's process, which spares 7 s. vLLM's
CPU platform sets VLLM_WORKER_MULTIPROC_METHOD=spawn itself. A prefill server of TP 2, a decode server of TP 1 and the reference,
started side by side, take 40 s of two cores and 5.3 GB.

On GPUs, a server starts in one to three minutes, because vLLM compiles the model and captures CUDA graphs. All servers share the
first GPUs. With one GPU, tests that use `MAX_TP` start TP 1 servers instead of TP 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.vllm.servers import HOST

MODEL_NAME = "demo"
MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 256 << 20  # of each rank; of TP 1 it holds some ten thousand tokens of the tests' model
HAS_GPU = torch.cuda.is_available()
MAX_TP = 1 if torch.cuda.device_count() == 1 else 2
CACHE = Path(sys.prefix) / "cache"  # what vLLM found out about models, kept with the environment
SITE = Path(__file__).resolve().parent / "servers_site"  # makes vLLM's waiting loops sleep: see there why

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CACHE_ROOT": str(CACHE)}
if HAS_GPU:
    # By default, Triton rounds the factors of float32 products to TF32.
    ENVIRONMENT |= {"TRITON_F32_DEFAULT": "ieee", "TRITON_CACHE_DIR": str(CACHE / "triton")}
    DEVICE_ARGS = ["--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.1", "--disable-custom-all-reduce"]
    # The size of blocks on CPUs. The tests' prompts and numbers of blocks are chosen for it.
    DEVICE_ARGS += ["--block-size", "128"]
else:
    ENVIRONMENT |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
    }
    DEVICE_ARGS = ["--enforce-eager"]


def vllm_command(
    model: Path, *, tp: int = 1, kv_transfer_config: Mapping[str, Any] | None = None, port: int = 0, args: Sequence[str] = ()
) -> list[str]:
    """Command line of a vLLM server in float32, so that its greedy tokens depend on nothing but the prompt.

    Args:
        model: Hugging Face directory.
        tp: Tensor parallel degree.
        kv_transfer_config: As `--kv-transfer-config` takes it; None: no connector.
        port: 0 takes a free one.
        args: Further arguments; they are stronger than those here.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port)]
    command += ["--dtype", "float32", "--tensor-parallel-size", str(tp), *DEVICE_ARGS]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    if kv_transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
    return [*command, *args]


def vllm_environment(*, in_core: bool = False) -> dict[str, str]:
    """Environment of a vLLM server.

    Args:
        in_core: With TP 1, have the worker in the engine core's process: starts in two thirds of the time. On GPUs it always is.
    """
    return ENVIRONMENT | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_core and not HAS_GPU else {})


def route_command(*, prefill: Sequence[str], decode: Sequence[str], args: Sequence[str] = ()) -> list[str]:
    """Command line of the router, on a free port.

    Args:
        prefill, decode: URLs of servers.
        args: Further arguments.
    """
    command = [sys.executable, "-m", "kvferry", "route", "--host", HOST, "--port", "0"]
    for option, urls in (("--prefill", prefill), ("--decode", decode)):
        command += [part for url in urls for part in (option, url)]
    return [*command, *args]
