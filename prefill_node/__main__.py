"""`prefill-node`: the prefill tier's daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node_runtime.command import print_version, run_daemon
from node_runtime.daemon import Daemon
from prefill_node.node import PrefillNode
from transfer.config import PrefillNodeConfig

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Computes prompts and moves their KV to decode nodes.")


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
    ready_file: Annotated[Path | None, typer.Option(help="Written once the node is ready (ready_file).")] = None,
    log_level: Annotated[str | None, typer.Option(help="log.level")] = None,
    log_format: Annotated[str | None, typer.Option(help="log.format")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Any setting, by its path.")] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Say whether the settings are right, and end.")] = False,
) -> None:
    """Run a prefill node until SIGTERM or SIGINT."""
    run_daemon(
        PrefillNodeConfig,
        file=config,
        flags={
            "model": model,
            "parallel.tp_size": tp,
            "pool.page_size": page_size,
            "server.host": host,
            "server.port": port,
            "server.http_port": http_port,
            "transport.name": transport,
            "ready_file": ready_file,
            "log.level": log_level,
            "log.format": log_format,
        },
        overrides=set_ or [],
        is_check_only=check_config,
        serve=_serve,
    )


async def _serve(config: PrefillNodeConfig) -> int:
    return await Daemon(config, lambda daemon: PrefillNode(daemon, config)).run()


def main() -> None:
    """Entry point of the `prefill-node` script."""
    app()


if __name__ == "__main__":
    main()
