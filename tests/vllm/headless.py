"""Run the ranks of a vLLM engine on a further host, as `vllm serve --headless` does.

vLLM's own command asks for the package `vllm`, and the build for CPUs has another name. The options are those of a server.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    args.api_server_count = 0  # as the command sets it
    run_headless(args)
