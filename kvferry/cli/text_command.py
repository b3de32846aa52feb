"""Commands of a command line: they accept only text, may be coroutines, return their exit code, and report errors as lines."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer

from node_runtime import exit_codes
from node_runtime.command_line import HelpfulCommand, HelpfulTyper
from transfer.errors import TransferError
from transfer.utf8 import is_utf8


class TextCommand(HelpfulCommand):
    """A command that accepts only UTF-8 arguments. Its function, or coroutine, returns the exit code; None means success.

    Without the check, other arguments would raise an error where they are first sent or written, without naming the argument.
    A `TransferError` ends the command with the error's lines on standard error and the error's exit code.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run it.

        Raises:
            typer.BadParameter: An argument is not UTF-8.
            typer.Exit: The command has ended, with this exit code.
        """
        parameter: Any  # whose type Typer keeps to itself
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                if isinstance(value, str | Path) and not is_utf8(str(value)):
                    raise typer.BadParameter(f"{str(value)!r} is not UTF-8; it must be", ctx=ctx, param=parameter)
        try:
            code = super().invoke(ctx)
            if inspect.iscoroutine(code):
                from kvferry.cli.signals import run_until_signalled

                code = run_until_signalled(code)
        except TransferError as error:
            command = ctx.command_path.removeprefix(ctx.find_root().command_path)
            for line in str(error).splitlines():
                print(f"kvferry{command}: {line}", file=sys.stderr)
            code = exit_codes.exit_code_of(error, is_call=True)
        raise typer.Exit(code or exit_codes.OK)


class TextTyper(HelpfulTyper):
    """A `typer.Typer` that makes such commands."""

    command_class = TextCommand
