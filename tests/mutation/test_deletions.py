"""The tool that deletes statements deletes each of them, sees what notices, and cannot be fooled by a mutant that never ran."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutation.deletions import MODULES, ROOT, accepted, deletions_of, file_of, without

SOURCE = '''
"""Module."""

import os

LIMIT = 3


class Box:
    """Holds."""

    size: int = 1

    def put(self, one):
        """Put."""
        if one:
            self.size += 1
        else:
            self.size = 0
        match one:
            case 1:
                return os.sep
            case _:
                pass
        return None
'''


def test_each_statement_goes_once() -> None:
    found = deletions_of("ring", SOURCE)
    assert [one.text for one in found] == [
        "size: int = 1",
        "if one:",
        "self.size += 1",
        "orelse of: self.size = 0",
        "self.size = 0",
        "match one:",
        "case 1:",
        "return os.sep",
        "case _:",
    ]
    assert {one.function for one in found} == {"Box", "Box.put"}
    texts = {ast.unparse(without(ast.parse(SOURCE), one)) for one in found}
    assert len(texts) == len(found)
    assert all(len(text) < len(ast.unparse(ast.parse(SOURCE))) for text in texts)


def test_each_accepted_deletion_exists_and_has_a_reason() -> None:
    there = {one.name for name in MODULES for one in deletions_of(name, file_of(name).read_text())}
    assert not accepted().keys() - there
    assert all(len(reason) > 20 for reason in accepted().values())


@pytest.mark.timeout(300)  # two seconds on a quiet machine
def test_a_deletion_is_noticed_by_a_test_that_is_named() -> None:
    """Two statements of the real ring: each must be noticed, and both in their own processes."""
    (line,) = (one.line for one in deletions_of("ring", file_of("ring").read_text()) if one.text == "self._head = begin + size")
    command = [sys.executable, "-m", "tests.mutation.deletions", "--only", "ring", "--lines", f"{line}-{line + 1}", "--fresh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 deletions, 2 noticed (0 because they hang), 0 survived" in done.stdout
