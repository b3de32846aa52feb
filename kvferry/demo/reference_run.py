"""The reference generator as a process of its own: it starts while the tiers start, and is asked for its results at the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvferry.demo.dtype import EXACT_DTYPE
from kvferry.demo.reference_generate import ReferenceResult, result_of
from transfer.errors import EngineError

_POLL_S: Final = 0.05
_QUIET: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class ReferenceRun:
    """Runs `kvferry.demo.reference_generate`; a context manager that leaves no process.

    Args:
        model: Model directory.
        prompts: Texts.
        max_new_tokens: Tokens to generate for each.
        environment: Of its process.
        dtype: What the model computes in; None leaves it to the directory.
    """

    def __init__(
        self,
        model: Path,
        prompts: Sequence[str],
        max_new_tokens: int,
        environment: Mapping[str, str],
        *,
        dtype: str | None = EXACT_DTYPE,
    ) -> None:
        self._num_prompts = len(prompts)
        self._task = {
            "model": str(model),
            "dtype": dtype or "auto",
            "max_new_tokens": max_new_tokens,
            "prompts": list(prompts),
        }
        self._environment = dict(environment) | _QUIET
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-reference-")
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        (folder / "task").write_text(json.dumps(self._task))
        command = [sys.executable, "-m", "kvferry.demo.reference_generate"]
        with (
            open(folder / "task", "rb") as task,
            open(self.results_file, "wb") as results,
            open(folder / "errors", "wb") as errors,
        ):
            self._process = subprocess.Popen(
                command, stdin=task, stdout=results, stderr=errors, env=self._environment, start_new_session=True
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        self._folder.cleanup()

    @property
    def results_file(self) -> Path:
        """One line of JSON for each result, written as it is made; gone when the context ends."""
        return Path(self._folder.name) / "results"

    @property
    def pid(self) -> int:
        """Of its process, once it is entered."""
        assert self._process is not None, "enter it first"
        return self._process.pid

    def cancel(self) -> None:
        """End it now: nothing waits for the results that it has not made yet."""
        self._is_cancelled = True
        self._kill()

    async def results(self) -> list[ReferenceResult | None]:
        """Wait until it has ended; one result for each prompt, in order, None for those that it had not made when cancelled.

        Raises:
            EngineError: It failed; its last line is named.
        """
        assert self._process is not None, "enter it first"
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
        lines = _lines_of(self.results_file)
        if self._is_cancelled:
            made = [result_of(line) for line in lines if line.endswith("}")]  # the last line may be cut off
            return [*made, *[None] * (self._num_prompts - len(made))]
        if self._process.returncode or len(lines) != self._num_prompts:
            errors = _lines_of(Path(self._folder.name) / "errors")
            why = errors[-1] if errors else f"exit code {self._process.returncode}, {len(lines)} of {self._num_prompts} results"
            raise EngineError(f"the single process that the tokens are compared with failed: {why}")
        return [result_of(line) for line in lines]

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _lines_of(file: Path) -> list[str]:
    return [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
