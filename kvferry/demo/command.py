"""`kvferry demo`: run both tiers on this machine, send prompts, compare the tokens with a single process, and report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich.console import Console

import transfer
from kvferry.bench_serve.report import cpu_name
from kvferry.cli.json_report import is_standard_output, write_report
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import ModelKind, cached_demo_model
from kvferry.demo.offload import (
    POOL_TOKENS,
    PREFILL_CHUNK_TOKENS,
    PREFILL_HOST_TOKENS,
    Figures,
    offload_report,
    offload_settings,
    prefill_offload_report,
    prefill_pool_tokens,
    store_settings,
)
from kvferry.demo.options import DemoOptions
from kvferry.demo.prompts import architecture, check_prompts_fit, chosen_dtype, load_prompts, model_dtype
from kvferry.demo.reference import EXACT_DTYPE, ReferenceRun
from kvferry.demo.report import DemoReport, DemoRequest, find_leaks, make_report
from kvferry.demo.sparse import prefill_density, sparse_report, sparse_settings
from kvferry.demo.view import DemoView, print_report
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, NodeFailed, TierSpec
from node_runtime import exit_codes
from transfer.errors import ConfigError, TransferError
from transfer.pb import kvferry_pb2 as pb

REQUEST_TIMEOUT_S: Final = 300.0
IDLE_TIMEOUT_S: Final = 5.0  # ranks report what they hold four times a second
TIGHT_RUNNING_REQUESTS: Final = 4
TIGHT_CHUNK_TOKENS: Final = 32
DEMO_HEARTBEAT_S: Final = 1.0  # on a busy laptop, the default would give up after 1.5 s, three missed heartbeats
_STATUS_S: Final = 0.25
_POLL_S: Final = 0.05
_CLEAR_REFUSALS: Final = (exit_codes.BAD_INPUT, exit_codes.DOES_NOT_FIT)
_PACKAGES: Final = ("torch", "transformers", "triton", "grpcio", "pyzmq", "ucxx-cu13", "ucxx-cu12")


def cluster_of(options: DemoOptions, model: Path, num_requests: int) -> ClusterSpec:
    """Return both tiers, with queues that hold all requests at once.

    The pools of windows and states are as large as the requests that run at once can need. Of the kinds that have some, few
    requests run at once, in small chunks, so that their pages are used again while the demo runs.
    """
    settings: dict[str, object] = {
        "limits.max_queued_requests": max(256, num_requests),
        "limits.queue_timeout_s": REQUEST_TIMEOUT_S,
    }
    dtype = chosen_dtype(options.dtype, model)
    if dtype is not None:
        settings["dtype"] = dtype
    is_tight = options.model_kind is not ModelKind.LLAMA
    if is_tight:
        settings["limits.max_running_requests"] = TIGHT_RUNNING_REQUESTS
    decode_settings = dict(settings)
    if options.offload is not None:
        decode_settings |= offload_settings(options.offload) | {"pool.num_tokens": POOL_TOKENS}
        settings |= store_settings(options.offload)
    if options.speculative is not None:
        decode_settings["speculative.method"] = options.speculative
    if options.speculative == "draft_model":
        settings["speculative.model"] = decode_settings["speculative.model"] = options.draft_model or model
    if options.prefill_offload:
        settings["pool.num_tokens"] = pool_tokens = prefill_pool_tokens(options.model_kind)
        settings["offload.host_ratio"] = PREFILL_HOST_TOKENS / pool_tokens
    if options.sparse_policy != "none":
        settings |= sparse_settings(options.sparse_threshold)
    if options.device == "cuda":
        settings["device"] = decode_settings["device"] = "cuda"
        decode_settings["first_device"] = first_decode_device(options.prefill_tp, options.decode_tp)
    return ClusterSpec(
        prefill=TierSpec(
            model=model,
            tp_size=options.prefill_tp,
            page_size=options.prefill_page_size,
            order=options.prefill_order,
            settings=settings,
        ),
        decode=TierSpec(
            model=model,
            tp_size=options.decode_tp,
            page_size=options.decode_page_size,
            order=options.decode_order,
            settings=decode_settings,
        ),
        transport=options.transport,
        heartbeat_s=DEMO_HEARTBEAT_S,
        chunk_tokens=PREFILL_CHUNK_TOKENS if options.prefill_offload else TIGHT_CHUNK_TOKENS if is_tight else None,
    )


def first_decode_device(prefill_tp: int, decode_tp: int) -> int:
    """Return the first GPU of the decode tier: after those of the prefill tier, or 0 if there are too few for both tiers.

    Raises:
        ConfigError: There are too few for one of the tiers.
    """
    import torch

    count = torch.cuda.device_count()
    if count < max(prefill_tp, decode_tp):
        raise ConfigError(
            f"--device is cuda, and torch sees {count} GPUs; a tier of TP {max(prefill_tp, decode_tp)} needs as many: "
            "lower --prefill-tp or --decode-tp, or use --device cpu"
        )
    return prefill_tp if count >= prefill_tp + decode_tp else 0


async def run_demo(options: DemoOptions) -> int:
    """Run the demo. Return the exit code, which is 0 only if all tokens match and no resource is still held.

    Raises:
        TransferError: It could not be run, or its report could not be written.
    """
    console = Console(stderr=is_standard_output(options.json_file))
    try:
        report = await _run(options, DemoView(console))
    except NodeFailed as error:
        # One line says why a node refused to start. Of a node that died, the end of its log says more.
        if error.exit_code not in _CLEAR_REFUSALS:
            for line in error.log_tail:
                print(f"  {line}", file=sys.stderr)
        print(f"kvferry demo: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code is not None and error.exit_code > 0 else exit_codes.FAILED
    except asyncio.CancelledError:
        print("kvferry demo: interrupted", file=sys.stderr)
        raise
    print_report(console, report)
    write_report(report.to_json(), options.json_file)
    return exit_codes.OK if report.is_success else exit_codes.FAILED


async def _run(options: DemoOptions, view: DemoView) -> DemoReport:
    begun_s = time.monotonic()
    prompts = load_prompts(options.prompts_file, options.num_requests)
    requests = [
        DemoRequest(number=number, prompt=prompt, max_new_tokens=options.max_new_tokens)
        for number, prompt in enumerate(prompts, 1)
    ]
    with view:
        model = options.model
        if model is None:
            view.phase(f"the demo model, {options.model_kind}, with random weights: its text has no meaning")
            model = await cached_demo_model(options.model_kind)
        await check_prompts_fit(model, prompts, options.max_new_tokens)
        dtype, own_dtype = chosen_dtype(options.dtype, model), model_dtype(model)
        if dtype == EXACT_DTYPE and own_dtype not in (None, EXACT_DTYPE):
            view.phase(
                f"the model is {own_dtype}; computing in {dtype}, where tokens are comparable (--dtype model keeps its own)"
            )
        cluster = LocalCluster(cluster_of(options, model, len(prompts)))
        with ReferenceRun(model, prompts, options.max_new_tokens, cluster.environment, dtype=dtype) as reference:
            view.phase(
                f"starting prefill TP {options.prefill_tp} (pages of {options.prefill_page_size}) "
                f"and decode TP {options.decode_tp} (pages of {options.decode_page_size})"
            )
            async with cluster:
                view.phase(f"{len(prompts)} prompts at once")
                generate_begun_s = time.monotonic()
                await _generate_all(cluster, requests, view, reference)
                generate_s = time.monotonic() - generate_begun_s
                leaked = await wait_idle(cluster)
                offload = None
                if options.offload is not None:
                    longest = max(one.prompt_tokens + len(one.token_ids) for one in requests)
                    offload = await offload_report(cluster, longest_request_tokens=longest, page_size=options.decode_page_size)
                prefill_offload = None
                if options.prefill_offload:
                    longest = max(one.prompt_tokens for one in requests)
                    prefill_offload = await prefill_offload_report(
                        cluster, device_tokens=prefill_pool_tokens(options.model_kind), longest_prompt_tokens=longest
                    )
                density = await prefill_density(cluster)
                drafts = await draft_counts(cluster)
                prefill, decode = await cluster.prefill.status(), await cluster.decode.status()
                if not any(request.error for request in requests):
                    view.phase("waiting for the single-process reference")
                results = await reference.results()
                view.phase("stopping")
                stopped = await cluster.stop()
        view.phase("stopped")
    sparse = None
    if options.sparse_policy != "none":
        outputs = [one.token_ids for one in requests]
        sparse = sparse_report(outputs, results, threshold=options.sparse_threshold, density=density)
    return make_report(
        requests,
        results,
        decode=decode,
        leaked=[*leaked, *stopped.complaints],
        seconds=time.monotonic() - begun_s,
        generate_seconds=generate_s,
        dtype=dtype or "as stored",
        model_kind=options.model_kind if options.model is None else architecture(model),
        prefill=prefill if offload is None else None,
        offload=offload,
        prefill_offload=prefill_offload,
        sparse=sparse,
        draft_tokens=drafts[0],
        accepted_tokens=drafts[1],
        environment=_environment(options, model),
    )


async def _generate_all(cluster: LocalCluster, requests: Sequence[DemoRequest], view: DemoView, reference: ReferenceRun) -> None:
    view.requests = requests
    async with NodeClient(cluster.decode.address) as client:
        watching = asyncio.create_task(_watch_status(client, view))
        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(generate_one(client, request, view, reference))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def generate_one(client: NodeClient, request: DemoRequest, view: DemoView, reference: ReferenceRun) -> None:
    """Run one request to its end. Its error does not affect other requests."""
    call = pb.GenerateRequest(
        request_id=f"demo-{secrets.token_hex(4)}-{request.number}",
        prompt=request.prompt,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=True,
    )
    try:
        # All are sent at once, so on a small machine the last one waits long for its first answer.
        events = client.generate(call, accept_timeout_s=REQUEST_TIMEOUT_S, timeout_s=REQUEST_TIMEOUT_S)
        async with contextlib.aclosing(events):
            async for event in events:
                match event.WhichOneof("event"):
                    case "accepted":
                        request.state, request.prompt_tokens = "accepted", event.accepted.prompt_tokens
                    case "tokens":
                        request.state = "generating"
                        request.token_ids.extend(event.tokens.token_ids)
                        request.text += event.tokens.text
                    case "done":
                        request.state, request.done = "done", event.done
    except TransferError as failure:
        request.state, request.done, request.error = "failed", None, str(failure)
        reference.cancel()  # the run has failed, and a large model could compute for minutes
    view.finished(request)


async def _watch_status(client: NodeClient, view: DemoView) -> None:
    while True:
        with contextlib.suppress(TransferError):  # requests report their own errors
            view.status = await client.status()
        await asyncio.sleep(_STATUS_S)


async def draft_counts(cluster: LocalCluster) -> tuple[int, int]:
    """Return the draft tokens of all steps, and the number of those that were accepted."""
    decode = Figures((await cluster.decode.http("/metrics"))[1])
    return decode.sum("spec_decode_draft_tokens_total"), decode.sum("spec_decode_accepted_tokens_total")


async def wait_idle(cluster: LocalCluster) -> list[str]:
    """Return the resources that nodes still hold after they had time to release them; empty means none.

    Raises:
        NodeFailed: A node has ended.
    """
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        leaked: list[str] = []
        for node in cluster.nodes:
            node.check_alive()
            leaked += find_leaks(await node.status(), name=node.name)
        if not leaked or time.monotonic() > deadline_s:
            return leaked
        await asyncio.sleep(_POLL_S)


def _environment(options: DemoOptions, model: Path) -> dict[str, Any]:
    """Return settings, versions and the machine."""
    versions = {"kvferry": transfer.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "prefill_tp": options.prefill_tp,
        "decode_tp": options.decode_tp,
        "prefill_page_size": options.prefill_page_size,
        "decode_page_size": options.decode_page_size,
        "max_new_tokens": options.max_new_tokens,
        "model": model.name if options.model is None else str(model),
        "versions": versions,
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "system": platform.platform(),
    }
