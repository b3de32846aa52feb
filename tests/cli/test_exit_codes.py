"""docs/operations.md says which exit code `kvferry` ends with, and so does the code."""

from __future__ import annotations

import re
from pathlib import Path

import grpc

from kvferry import exit_codes
from transfer.errors import OutOfMemory
from transfer.registry.status import error_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([A-Z_]+)` \| (\d+) \| [^|]+ \|([^|]*)\|$", TEXT, re.MULTILINE)


def test_every_exit_code_of_the_command_is_explained() -> None:
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper() and not name.startswith("_")}
    assert {name: int(code) for name, code, _ in ROWS} == codes and len(ROWS) == len(codes)


def test_every_grpc_status_has_the_exit_code_of_its_row() -> None:
    listed = {status: int(code) for _, code, statuses in ROWS for status in re.findall(r"`([A-Z_]+)`", statuses)}
    metadata = grpc.aio.Metadata()
    found = {
        status.name: exit_codes.exit_code_of(error_of(grpc.aio.AioRpcError(status, metadata, metadata), peer="h:1"))
        for status in grpc.StatusCode
        if status is not grpc.StatusCode.OK
    }
    assert found == listed
    assert exit_codes.exit_code_of(OutOfMemory("in a step")) == listed["RESOURCE_EXHAUSTED"]
