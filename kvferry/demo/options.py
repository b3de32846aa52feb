"""Options of the demos. Each field is an option of the command line. The nodes check their own settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from kvferry.bench_serve.workload import MAX_RATE, MAX_REQUESTS, MAX_SECONDS
from kvferry.cli.json_report import check_writable
from kvferry.cli.options import check_range, member
from kvferry.demo.kinds import ModelKind
from kvferry.demo.reference import EXACT_DTYPE
from transfer.errors import ConfigError
from transfer.layout import MAX_RANKS, TokenOrder

_MAX_NODES: Final = 16
_MAX_PAGE_SIZE: Final = 4096
_TRANSPORTS: Final = ("auto", "shm", "ucx", "nixl", "cuda_ipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `kvferry demo`."""

    prefill_tp: Annotated[int, typer.Option(help="Tensor parallel degree of the prefill tier.")] = 4
    decode_tp: Annotated[int, typer.Option(help="Tensor parallel degree of the decode tier.")] = 2
    prefill_page_size: Annotated[int, typer.Option(help="Tokens per page of the prefill tier.")] = 16
    decode_page_size: Annotated[int, typer.Option(help="Tokens per page of the decode tier.")] = 32
    prefill_order: Annotated[str, typer.Option(help="Order inside the prefill tier's pages: NHD or HND.")] = "NHD"
    decode_order: Annotated[str, typer.Option(help="Order inside the decode tier's pages: NHD or HND.")] = "NHD"
    transport: Annotated[str, typer.Option(help="Data plane: auto, shm, ucx, nixl, or cuda_ipc between GPUs.")] = "auto"
    device: Annotated[str, typer.Option(help="cpu or cuda (one GPU per rank; the tiers share GPUs if there are too few).")] = (
        "cpu"
    )
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; by default a small generated model.")] = None
    model_kind: Annotated[ModelKind, typer.Option(help="Kind of the generated model.")] = ModelKind.LLAMA
    dtype: Annotated[str, typer.Option(help="float32, where tokens are comparable, or model: its own.")] = EXACT_DTYPE
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", help="Text file with one prompt per line; by default built-in prompts.")
    ] = None
    num_requests: Annotated[int | None, typer.Option("--requests", help="Number of requests; by default each prompt once.")] = (
        None
    )
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32
    offload: Annotated[
        Path | None,
        typer.Option(help="Keep KV in this directory, behind a small device pool and host memory; run it twice."),
    ] = None
    prefill_offload: Annotated[
        bool, typer.Option("--prefill-offload", help="Compute prompts that do not fit the prefill device pool, in host memory.")
    ] = False
    sparse_policy: Annotated[str, typer.Option(help="Attention of the prefill tier: none or xattention.")] = "none"
    sparse_threshold: Annotated[float, typer.Option(help="Fraction of the estimated attention to keep; 1 keeps all.")] = 0.9
    speculative: Annotated[
        str | None,
        typer.Option(help="Speculative decoding: ngram (draft tokens from the request's own text) or draft_model."),
    ] = None
    draft_model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the draft model; by default the model itself.")
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file as JSON; - is standard output.")
    ] = None

    def __post_init__(self) -> None:
        for tier in ("prefill", "decode"):
            check_range(f"--{tier}-tp", getattr(self, f"{tier}_tp"), 1, MAX_RANKS)
            check_range(f"--{tier}-page-size", getattr(self, f"{tier}_page_size"), 1, _MAX_PAGE_SIZE)
            member(TokenOrder, f"--{tier}-order", getattr(self, f"{tier}_order"))
        if self.transport not in _TRANSPORTS:
            raise ConfigError(
                f"--transport is {self.transport}; it must be one of {', '.join(_TRANSPORTS)}, which choose "
                "RDMA or TCP by themselves"
            )
        if self.sparse_policy not in ("none", "xattention"):
            raise ConfigError(f"--sparse-policy is {self.sparse_policy}; it must be none or xattention")
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        if self.dtype not in (EXACT_DTYPE, "model"):
            raise ConfigError(f"--dtype is {self.dtype}; it must be {EXACT_DTYPE} or model")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device is {self.device}; it must be cpu or cuda")
        if self.speculative not in (None, "ngram", "draft_model"):
            raise ConfigError(f"--speculative is {self.speculative}; it must be ngram or draft_model")
        if self.draft_model is not None and self.speculative != "draft_model":
            raise ConfigError(f"--draft-model is {self.draft_model}; it needs --speculative draft_model")
        if self.model is not None and self.model_kind is not ModelKind.LLAMA:
            raise ConfigError(f"--model-kind is {self.model_kind}; it applies to the generated model, but --model names another")
        check_writable(self.json_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoClusterOptions:
    """Options of `kvferry demo-cluster`."""

    num_prefill: Annotated[int, typer.Option("--prefill", help="Prefill nodes.")] = 2
    num_decode: Annotated[int, typer.Option("--decode", help="Decode nodes.")] = 2
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 3.0
    seconds: Annotated[float, typer.Option(help="Duration of the load.")] = 20.0
    is_kept: Annotated[bool, typer.Option("--keep", help="Keep the cluster running until Ctrl-C.")] = False
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary to this file as JSON; - is standard output.")
    ] = None

    def __post_init__(self) -> None:
        check_range("--prefill", self.num_prefill, 1, _MAX_NODES)
        check_range("--decode", self.num_decode, 1, _MAX_NODES)
        for name, number, largest in (("--rate", self.rate, MAX_RATE), ("--seconds", self.seconds, MAX_SECONDS)):
            if not 0 < number <= largest:
                raise ConfigError(f"{name} is {number:g}; it must be above 0 and at most {largest}")
        if self.rate * self.seconds > MAX_REQUESTS:
            raise ConfigError(f"--rate {self.rate:g} for --seconds {self.seconds:g} is over {MAX_REQUESTS} requests")
        check_writable(self.json_file)
