"""Generate from the same prompts in one process: transformers' own `generate`, greedy, with its own attention and cache.

Run as a program, it reads one JSON object from standard input and writes one line of JSON for each prompt, in order:
``{"model": DIR, "dtype": NAME, "max_new_tokens": N, "prompts": [text, ...]}`` gives ``{"prompt_tokens": P, "token_ids": [...]}``.
It shares only the model directory with the tiers, including the Python part of its tokenizer. The demo starts it while the
tiers start, and collects its results at the end.

Two correct runs of one model add up the same numbers in different orders: with and without a cache, over one rank or four. In
float32 that changes a logit by far less than the distance to the next one. In bfloat16 logits can be equal, and the runs can then
differ in a token although nothing was damaged. So tokens are compared in float32, independent of the stored type of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from transfer.errors import EngineError

EXACT_DTYPE: Final = "float32"
_NICENESS: Final = 5  # the tiers start meanwhile, and the demo waits for them
_POLL_S: Final = 0.05
_QUIET: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """Output of a single process for one prompt."""

    prompt_tokens: int
    token_ids: tuple[int, ...]


def generate_all(model_dir: Path, prompts: Sequence[str], max_new_tokens: int, *, dtype: str) -> Iterator[ReferenceResult]:
    """Generate for each prompt by itself, greedily, past the model's own end token.

    Args:
        max_new_tokens: Exact number of tokens to generate for each.
        dtype: Torch's name of the type in which the model computes; ``auto`` leaves it to the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True).eval()
    no_end = [model.config.vocab_size]  # an id that no token has: nothing ends the generation early
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=no_end,
                pad_token_id=0,
            )
        prompt_tokens = ids.shape[1]
        yield ReferenceResult(prompt_tokens=prompt_tokens, token_ids=tuple(output[0, prompt_tokens:].tolist()))


def result_of(line: str) -> ReferenceResult:
    """Parse one line of the program's output.

    Raises:
        ValueError: The line has another form.
    """
    content = json.loads(line)
    if not isinstance(content, dict) or set(content) != {"prompt_tokens", "token_ids"}:
        raise ValueError(f"no line of the reference: {line[:80]!r}")
    return ReferenceResult(prompt_tokens=content["prompt_tokens"], token_ids=tuple(content["token_ids"]))


class ReferenceRun:
    """Run this module as a program. The context manager ends the process.

    Args:
        environment: Environment variables of its process.
        dtype: Type in which the model computes; None means that the directory decides.
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
        command = [sys.executable, "-m", "kvferry.demo.reference"]
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
        """Return the file with one line of JSON for each result so far; the end of the context deletes it."""
        return Path(self._folder.name) / "results"

    @property
    def pid(self) -> int:
        """Return the process id. The context must be entered."""
        assert self._process is not None, "enter it first"
        return self._process.pid

    def cancel(self) -> None:
        """Kill the process; `results` then returns what it has written."""
        self._is_cancelled = True
        self._kill()

    async def results(self) -> list[ReferenceResult | None]:
        """Wait until the process has ended. Return a result for each prompt, in order; None for those after a `cancel`.

        Raises:
            EngineError: It failed.
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


def _main() -> None:
    task = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    for result in generate_all(Path(task["model"]), task["prompts"], task["max_new_tokens"], dtype=task["dtype"]):
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    _main()
