"""Keeps the demo models between runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import transfer
from kvferry.demo.kinds import ModelKind
from kvferry.local_cluster.spec import child_environment
from transfer.errors import EngineError

CACHE_FOLDER: Final = Path(".kvferry")
_POLL_S: Final = 0.05


async def cached_demo_model(
    kind: ModelKind = ModelKind.LLAMA, *, run: Callable[[list[str]], Awaitable[None]] | None = None
) -> Path:
    """The directory of the demo model of a kind; it is made at the first call, in a few seconds.

    It lies in ``.kvferry`` of the working directory, or in the system's temporary folder where that cannot be written. Its name
    holds what the model depends on, so that another version makes another one.

    Args:
        run: Runs the command line that makes the model; by default in a process.

    Raises:
        EngineError: It could not be made.
    """
    directory = _cache_folder() / f"demo-model-{kind}-{_key()}"
    if directory.exists():
        return directory
    # Made elsewhere and moved at the end: a directory under the final name is always whole.
    with tempfile.TemporaryDirectory(prefix="new-", dir=directory.parent) as folder:
        fresh = Path(folder) / directory.name
        await (run or _run)([sys.executable, "-m", "kvferry", "model", "make", "--kind", kind, str(fresh)])
        try:
            fresh.rename(directory)
        except OSError:
            if not directory.exists():  # else another run was faster
                raise
    return directory


def _key() -> str:
    """Of everything that decides a model's bytes: the code that makes it, and kvferry's version."""
    source = hashlib.sha256()
    for name in ("model.py", "kinds.py"):
        source.update(Path(__file__).with_name(name).read_bytes())
    return f"{transfer.__version__}-{source.hexdigest()[:12]}"


def _cache_folder() -> Path:
    with contextlib.suppress(OSError):
        CACHE_FOLDER.mkdir(exist_ok=True)
    if os.access(CACHE_FOLDER, os.W_OK | os.X_OK):
        return CACHE_FOLDER.resolve()
    folder = Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineError(f"{folder} belongs to somebody else; run the demo in a directory that you can write to")
    return folder


async def _run(command: list[str]) -> None:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None:
                await asyncio.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise EngineError(f"the demo model could not be made: {lines[-1] if lines else f'exit code {process.returncode}'}")
