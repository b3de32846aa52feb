"""Parts of the command lines of `kvferry`, `prefill-node` and `decode-node`: help, errors of arguments, and plain text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from transfer.plain_text import ANYWHERE, ON_LOOPBACK

_Function = TypeVar("_Function", bound=Callable[..., Any])

SECURITY_PANEL: Final = "Security"
_UsageError: Final[Any] = typer.BadParameter.__base__  # where click's class is depends on the version of typer

Insecure = Annotated[
    int,
    typer.Option(
        "--insecure",
        count=True,
        show_default=False,
        rich_help_panel=SECURITY_PANEL,
        help="Use plain text instead of TLS, on loopback addresses only (tls.insecure: 1).",
    ),
]
InsecureAnywhere = Annotated[
    bool,
    typer.Option(
        "--insecure-anywhere",
        rich_help_panel=SECURITY_PANEL,
        help="Use plain text instead of TLS on any address (tls.insecure: 2).",
    ),
]


def insecure_level(program: str, count: int, is_anywhere: bool) -> int | None:
    """Return the value of `tls.insecure` for the flags; None means that no flag is given.

    ``--insecure --insecure`` is accepted with a warning. It meant ``--insecure-anywhere`` in version 0.1.
    """
    if count > 1 and not is_anywhere:
        print(f"{program}: warning: --insecure twice is deprecated; use --insecure-anywhere", file=sys.stderr)
    if is_anywhere or count > 1:
        return ANYWHERE
    return ON_LOOPBACK if count else None


def example(text: str) -> str:
    """Return the end of a command's help: a command line that a reader can copy."""
    return f"Example: {text}"


def _without_types(parameters: list[Any]) -> list[Any]:
    """Show no type for options that take no value."""
    for one in parameters:
        if getattr(one, "is_flag", False) or getattr(one, "count", False):
            one.metavar = ""
    return parameters


class HelpfulCommand(TyperCommand):
    """A command whose errors of arguments name the solution."""

    owners: ClassVar[Mapping[str, str]] = {}
    """Options of other programs, and the program that has them."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, with that of ``--help``."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments.

        Raises:
            UsageError: They are wrong.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            owner = self.owners.get(getattr(error, "option_name", ""))
            if owner is not None:
                error.possibilities = None
                error.message = f"No such option: {error.option_name}. It is an option of {owner}."
            elif any(one == "--insecure" and after.isdecimal() for one, after in itertools.pairwise(given)):
                error.message += (
                    ". --insecure takes no value; for plain text on other than loopback addresses, use --insecure-anywhere"
                )
            raise


class HelpfulGroup(TyperGroup):
    """A group of such commands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, with that of ``--help``."""
        return _without_types(super().get_params(ctx))


class HelpfulTyper(typer.Typer):
    """A `typer.Typer` whose commands have ``-h`` and helpful errors."""

    command_class: ClassVar[Any] = HelpfulCommand

    def __init__(self, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=HelpfulGroup, no_args_is_help=True, context_settings=names, **settings)

    def command(self, name: str | None = None, *, cls: Any = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=cls or self.command_class, **settings)
