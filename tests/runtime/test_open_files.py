"""A process of a node takes as many files as it may have: the usual soft limit is good for a few dozen sessions."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from node_runtime import open_files
open_files.MAX_OPEN_FILES = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
open_files.raise_open_files()
open_files.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("most", "soft"), [(65_536, 2048), (1000, 1000), (100, 256)])
def test_the_soft_limit_is_raised_as_far_as_it_may_and_never_lowered(most: int, soft: int) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(most)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(soft), "2048"], done.stderr


def test_a_process_without_a_file_left_says_just_that() -> None:
    """Whoever can connect can take them all; a rank that ended for want of a file to read its own figures helped them."""
    code = """
import resource
from transfer.connector.rank_report import process_figures
assert set(process_figures()) == {"open_files", "threads", "resident_bytes"}
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(process_figures())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "{'open_files': 3}", done.stderr
