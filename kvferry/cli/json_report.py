"""The file of a command's option `--json`: checked before a run, written after it. ``-`` is standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transfer.errors import ConfigError, TransferError


def is_standard_output(file: Path | None) -> bool:
    return str(file) == "-"


def check_writable(file: Path | None) -> None:
    """Check that a report can be written to `file`, and leave no new file behind.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """
    if file is None or is_standard_output(file):
        return
    target = Path(os.path.realpath(file))
    try:
        is_new = not target.exists()
        if not is_new and not (target.is_file() or target.is_dir()):
            return  # a pipe, for example: its reader would notice that it is opened
        target.open("a").close()
        if is_new:
            target.unlink()
    except OSError as error:
        raise ConfigError(_unwritable(file, error)) from error


def write_report(content: dict[str, Any], file: Path | None) -> None:
    """Write a report as JSON; None means no report.

    Raises:
        TransferError: It cannot be written, for example because the disk is full.
    """
    text = json.dumps(content, indent=2) + "\n"
    if is_standard_output(file):
        sys.stdout.write(text)
        sys.stdout.flush()
    elif file is not None:
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TransferError(_unwritable(file, error)) from error


def _unwritable(file: Path, error: OSError) -> str:
    return f"--json is {file}; it cannot be written: {error.strerror or error}"
