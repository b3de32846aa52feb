"""The commands of `kvferry`. Each command imports its own modules, so that help is fast."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

import transfer
from kvferry.bench_serve.options import LoadOptions
from kvferry.cli.generate import GenerateOptions, run_generate
from kvferry.cli.node_commands import node_app
from kvferry.cli.options import JsonFlag, Target, TlsOptions, with_options
from kvferry.cli.text_command import TextTyper
from kvferry.demo.kinds import ModelKind
from kvferry.demo.options import DemoClusterOptions, DemoOptions
from node_runtime.command_line import example
from transfer.errors import ConfigError

app = TextTyper(
    help="Transfer KV cache between prefill and decode servers: try it, plan it, operate it.",
    epilog="The nodes themselves are the commands prefill-node and decode-node.",
)
model_app = TextTyper(help="Make a small demo model.")
app.add_typer(model_app, name="model")
bench_app = TextTyper(help="Measure a running cluster under load.")
app.add_typer(bench_app, name="bench")
app.add_typer(node_app, name="node")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"kvferry {transfer.__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(epilog=example("kvferry demo --prefill-tp 2 --decode-tp 1 --requests 2"))
@with_options
async def demo(options: DemoOptions) -> int:
    """Run both tiers on this machine, send prompts, and compare every token with a single process."""
    from kvferry.demo.command import run_demo

    return await run_demo(options)


@app.command("demo-cluster", epilog=example("kvferry demo-cluster --prefill 2 --decode 2 --seconds 30"))
@with_options
async def demo_cluster(options: DemoClusterOptions) -> int:
    """Run several nodes of each tier on this machine under load, with Prometheus if it is installed, and print a summary."""
    from kvferry.demo.cluster import run_demo_cluster

    return await run_demo_cluster(options)


@model_app.command("make", epilog=example("kvferry model make /tmp/demo-model"))
def model_make(
    directory: Annotated[Path, typer.Argument(help="Directory to write; created if it is missing.")],
    kind: Annotated[ModelKind, typer.Option(help="State that the layers keep.")] = ModelKind.LLAMA,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier demo model in the directory.")] = False,
) -> None:
    """Make a small demo model: configuration, weights and tokenizer. The same kind and seed give the same bytes."""
    try:
        if directory.is_dir() and any(directory.iterdir()) and not force:
            raise ConfigError(f"{directory} is not empty; name another directory, or replace a demo model with --force")
        from kvferry.demo.model import make_demo_model

        made = make_demo_model(directory, kind=kind, seed=seed)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    print(made)


@app.command(epilog=example("kvferry plan --model MODEL --device-memory 80GiB --tp 4 --role decode"))
def plan(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Hugging Face directory; its config.json is enough.")],
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of each rank's device, for example 80GiB; detected by default.")
    ] = None,
    free_memory: Annotated[str | None, typer.Option(help="Free memory before the node starts; all of it by default.")] = None,
    role: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    tp: Annotated[int, typer.Option(help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel degree.")] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel degree within tp, with --dp-attention.")] = 1,
    dp_attention: Annotated[bool, typer.Option("--dp-attention", help="Shard attention over tp / dp ranks.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Element type of the computation; by default that of the checkpoint.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Element type of the KV pools; by default --dtype.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 16,
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Tokens of a prefill step; the default depends on the device.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a chunk of a prompt; the default depends on the device.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Concurrent requests; the default depends on the device.")
    ] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest sequence; by default the model's context.")] = None,
    cuda_graph_max_bs: Annotated[int | None, typer.Option(help="Largest batch with a CUDA graph; 0 disables graphs.")] = None,
    cuda_graph_bs: Annotated[str | None, typer.Option(help="Batch sizes with a CUDA graph, separated by commas.")] = None,
    enable_torch_compile: Annotated[
        bool, typer.Option("--enable-torch-compile", help="Compile decode steps with torch.compile.")
    ] = False,
    torch_compile_max_bs: Annotated[int, typer.Option(help="Largest batch to compile.")] = 32,
    speculative: Annotated[str | None, typer.Option(help="eagle, eagle3, nextn, dflash, standalone or ngram.")] = None,
    static_fraction: Annotated[
        float | None, typer.Option(help="Fraction of the device for weights and KV; computed by default.")
    ] = None,
    policy: Annotated[str, typer.Option(help="static-fraction or page-count.")] = "static-fraction",
    memory_ratio: Annotated[float, typer.Option(help="Fraction of the free memory, with --policy page-count.")] = 0.88,
    max_total_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of the pool.")] = None,
    staging: Annotated[str | None, typer.Option(help="Staging memory of a prefill rank; by default that of a node.")] = None,
    ring: Annotated[str | None, typer.Option(help="Ring of a decode rank, for example 1GiB; by default that of a node.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Measured weights of a rank, for example 16GiB; computed by default.")
    ] = None,
    sparse_policy: Annotated[str, typer.Option(help="Attention of prefill: none or xattention.")] = "none",
    sparse_block_size: Annotated[int, typer.Option(help="Tokens of a block of xattention.")] = 128,
    sparse_stride: Annotated[int, typer.Option(help="Tokens that xattention scores as one.")] = 16,
    workspace_strategy: Annotated[str, typer.Option(help="Buffers of xattention: chunk_bounded or lazy.")] = "chunk_bounded",
    kv_offload: Annotated[bool, typer.Option("--kv-offload", help="Keep pages of running requests in host memory, too.")] = False,
    json: JsonFlag = False,
    png: Annotated[Path | None, typer.Option(help="Write a chart to this .png file.")] = None,
    compare: Annotated[str | None, typer.Option(help='Compare with other settings, for example "tp=4,page_size=64".')] = None,
) -> int:
    """Plan the memory of a node's devices: weights, KV pool, reserve, and the number of tokens. This needs no GPU."""
    from kvferry.plan.command import run_plan
    from kvferry.plan.options import PlanOptions

    options = PlanOptions(**{one.name: context.params[one.name] for one in fields(PlanOptions)})
    return run_plan(model, options, is_json=json, png=png, compare=compare)


@app.command(epilog=example("kvferry generate --target 127.0.0.1:7100 --insecure 'The harbour was quiet'"))
@with_options
async def generate(
    *,
    target: Target,
    options: GenerateOptions,
    timeout: Annotated[float | None, typer.Option(help="Deadline of the whole request, in seconds.")] = None,
    tls: TlsOptions,
    json: JsonFlag = False,
) -> int:
    """Send a prompt to a decode node and stream the text. Ctrl-C cancels the request."""
    request, security = options.request(), tls.security("generate", target)
    return await run_generate(target, request, security=security, timeout_s=timeout, is_json=json)


@app.command(epilog=example("kvferry status --target 127.0.0.1:7100 --insecure"))
@with_options
async def status(
    target: Target,
    json: JsonFlag = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    *,
    tls: TlsOptions,
) -> None:
    """Show a node of either tier: state, ranks, pool, ring, peers, links."""
    from kvferry.cli.status_view import run_status

    security = tls.security("status", target)
    await run_status(target, security=security, is_json=json, is_watching=watch)


@bench_app.command(
    "serve", epilog=example("kvferry bench serve --target decode-0:7100 --rate 1,2,4 --duration 60 --config tls.yaml")
)
@with_options
async def bench_serve(
    *,
    options: LoadOptions,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart to this .png file.")] = None,
    tls: TlsOptions,
) -> int:
    """Send requests at a fixed rate (open loop), and report TTFT, TPOT, goodput and transferred bytes."""
    from kvferry.bench_serve.command import run_bench_serve

    security = tls.security("bench serve", *options.targets or ())
    return await run_bench_serve(options, security=security, json_file=json, plot=plot)


@app.command(epilog=example("kvferry route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200"))
@with_options
def route(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A vLLM prefill server (http://host:port), or a kvferry prefill node (grpc://host:port) for vLLM decode servers "
            "with kvferry's connector; repeatable.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A vLLM decode server (http://host:port), or a kvferry decode node (grpc://host:port), which has its "
            "own list of prefill nodes; repeatable.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 takes a free one.")] = 8000,
    flow: Annotated[
        str | None,
        typer.Option(
            metavar="concurrent|sequential",
            help="concurrent, the default: call both servers at once if the KV address of the prefill server is known.",
        ),
    ] = None,
    retries: Annotated[int, typer.Option(help="Further attempts of a request that fails before its first token.")] = 2,
    max_requests: Annotated[int, typer.Option(help="Most concurrent requests; more are answered with 503.")] = 1024,
    max_body: Annotated[str, typer.Option(help="Largest body of a request, for example 8MiB.")] = "8MiB",
    max_body_total: Annotated[
        str, typer.Option(help="Largest total size of the bodies of concurrent requests; more are answered with 503.")
    ] = "256MiB",
    connect_timeout: Annotated[float, typer.Option(help="Seconds for a connection to a server.")] = 5.0,
    health_interval: Annotated[float, typer.Option(help="Seconds between two health checks of a server.")] = 1.0,
    lost_after: Annotated[
        float, typer.Option(help="Seconds without a byte after which a request leaves a server whose health checks fail.")
    ] = 30.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish running requests after SIGTERM or SIGINT.")] = 60.0,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Hugging Face directory with the chat template, for kvferry decode nodes.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model of kvferry decode nodes; by default that of --tokenizer, or kvferry.")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write this file when the router accepts requests.")] = None,
    *,
    tls: TlsOptions,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> int:
    """Serve the OpenAI API in front of prefill and decode servers, until SIGTERM or SIGINT."""
    from kvferry.router.serve import run_route
    from kvferry.router.settings import router_settings

    settings = router_settings(
        prefill=prefill or (),
        decode=decode or (),
        flow=flow,
        max_body=max_body,
        max_body_total=max_body_total,
        host=host,
        port=port,
        retries=retries,
        max_requests=max_requests,
        connect_timeout_s=connect_timeout,
        health_interval_s=health_interval,
        lost_after_s=lost_after,
        drain_timeout_s=drain_timeout,
        tokenizer=tokenizer,
        model_name=model_name,
        ready_file=ready_file,
    )
    return run_route(settings, tls=tls.arguments("route"), log_level=log_level, log_format=log_format)


@app.command(epilog=example("kvferry top 127.0.0.1:7100 --insecure"))
@with_options
async def top(
    addresses: Annotated[
        list[str], typer.Argument(metavar="HOST:PORT...", help="gRPC addresses of nodes; they report their peers.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the cluster once, as plain text.")] = False,
    json: JsonFlag = False,
    every: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two updates.")] = 1.0,
    *,
    tls: TlsOptions,
) -> int:
    """Show a live cluster: nodes, rings, links, requests in flight. Keys drain nodes and abort requests."""
    from kvferry.top.command import run_top

    security = tls.security("top", *addresses, what="HOST:PORT")
    return await run_top(addresses, security=security, is_once=once, is_json=json, every_s=every)


@app.command(epilog=example("kvferry doctor --node 127.0.0.1:7100 --insecure"))
@with_options
def doctor(
    json: JsonFlag = False,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Also compare this machine with a running node; repeatable."),
    ] = None,
    node_config: Annotated[
        list[Path] | None,
        typer.Option(help="Also check that the ports of this configuration are free; repeatable."),
    ] = None,
    *,
    tls: TlsOptions,
) -> int:
    """Check this machine. The exit code is 1 if something that kvferry needs is missing."""
    from kvferry.doctor.command import run_doctor
    from kvferry.doctor.node import server_of

    security = tls.security("doctor", *node, what="--node") if node else None
    servers = [server_of(file) for file in node_config or ()]
    return run_doctor(is_json=json, nodes=node or (), security=security, servers=servers)


def main() -> None:
    """Entry point of the `kvferry` script."""
    app()


if __name__ == "__main__":
    main()
