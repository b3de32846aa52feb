"""One target under atheris: libFuzzer's search, guided by the branches of the instrumented modules.

Run by `python -m fuzz`; alone it takes libFuzzer's own options:
``python -m fuzz.search messages fuzz/corpus/messages -runs=1000``.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from fuzz.target import NAMES, load, peak_bytes
from fuzz.trees import BYTE_SHARE


def main() -> None:
    """Search until an option or a finding ends it."""
    import atheris

    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        raise SystemExit(
            f"usage: python -m fuzz.search TARGET [CORPUS...] [libFuzzer options]; TARGET is one of {', '.join(NAMES)}"
        )
    name = sys.argv.pop(1)
    for module in list(sys.modules):
        # What this package has imported by now was not instrumented.
        assert not module.startswith(("transfer", "planner", "prefill_node", "decode_node", "node_runtime")), (
            f"{module} is imported too early"
        )
    with atheris.instrument_imports(include=_instrumented(name)):
        target = load(name)

    def run(data: bytes) -> None:
        target.execute(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < BYTE_SHARE:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(data, rng)[:max_size]

    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *sys.argv[1:]], run, custom_mutator=mutate)
    peak_bytes()
    atheris.Fuzz()


def _instrumented(name: str) -> list[str]:
    """The modules of a target, which are named in it: read without importing it."""
    import ast
    from pathlib import Path

    tree = ast.parse((Path(__file__).parent / "targets" / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "modules":
            modules: Any = ast.literal_eval(node.value)
            return list(modules)
    raise AssertionError(f"target {name} names no modules")


if __name__ == "__main__":
    main()
