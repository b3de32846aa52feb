"""A rank takes as many files as it may have: the usual soft limit is good for a few dozen sessions."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from node_runtime import rank_process
rank_process.MAX_OPEN_FILES = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
rank_process.raise_open_files()
rank_process.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("most", "soft"), [(65_536, 2048), (1000, 1000), (100, 256)])
def test_the_soft_limit_is_raised_as_far_as_it_may_and_never_lowered(most: int, soft: int) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(most)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(soft), "2048"], done.stderr
