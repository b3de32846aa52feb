"""`decode-node`: the decode tier's daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decode_node.node import DecodeNode
from node_runtime.command import print_version, run_daemon
from node_runtime.daemon import Daemon
from transfer.config import DecodeNodeConfig

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Receives the KV of prompts and generates from it.")


@app.callback()
def callback(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Settings: --set, named flags, KVFERRY_... in the environment, the file; see docs/configuration.md."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model directory (model).")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel degree (parallel.tp_size).")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per page (pool.page_size).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (server.host).")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port, 0 for a free one (server.port).")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port (server.http_port).")] = None,
    transport: Annotated[str | None, typer.Option(help="Data plane (transport.name).")] = None,
    prefill_node: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="A prefill node, once for each (peers.prefill_nodes).")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written once the node is ready (ready_file).")] = None,
    log_level: Annotated[str | None, typer.Option(help="log.level")] = None,
    log_format: Annotated[str | None, typer.Option(help="log.format")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Any setting, by its path.")] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Say whether the settings are right, and end.")] = False,
) -> None:
    """Run a decode node until SIGTERM or SIGINT."""
    run_daemon(
        DecodeNodeConfig,
        file=config,
        flags={
            "model": model,
            "parallel.tp_size": tp,
            "pool.page_size": page_size,
            "server.host": host,
            "server.port": port,
            "server.http_port": http_port,
            "transport.name": transport,
            "peers.prefill_nodes": tuple(prefill_node) if prefill_node else None,
            "ready_file": ready_file,
            "log.level": log_level,
            "log.format": log_format,
        },
        overrides=set_ or [],
        is_check_only=check_config,
        serve=_serve,
    )


async def _serve(config: DecodeNodeConfig) -> int:
    return await Daemon(config, lambda daemon: DecodeNode(daemon, config)).run()


def main() -> None:
    """Entry point of the `decode-node` script."""
    app()


if __name__ == "__main__":
    main()
