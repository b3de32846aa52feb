"""What SGLang 0.5.23 asks of a machine with a GPU although it is told to run on the CPU. Python loads this at its start."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


def _without_operators_of_torchvision(torch: Any) -> None:
    """PyPI's torchvision is built for CUDA; beside a CPU build of torch its operators are missing, and its import fails."""
    register = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(op, str) and op.startswith("torchvision::")):
            return register(op, *args, **kwargs)

        def decorate(function: Any) -> Any:
            try:
                return register(op, *args, **kwargs)(function)
            except RuntimeError:
                return function

        return decorate

    torch.library.register_fake = register_fake


def _without_pinning(module: ModuleType) -> None:
    """The host pool that decode keeps retracted requests in is pinned by the CUDA driver."""
    # SGLang has no setting that leaves the pool unpinned.
    module._cuda_host_register = lambda *_, **__: None  # type: ignore[attr-defined]  # noqa: SLF001


def _reading_windows(module: ModuleType) -> None:
    """torch_native writes to the slots of windows, and reads the slots that full attention has for the same tokens."""
    backend = module.TorchNativeAttnBackend

    def reading(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            slots, pool = self.req_to_token_pool, self.token_to_kv_pool
            if self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
                self.req_to_token_pool = SimpleNamespace(req_to_token=pool.translate_loc_from_full_to_swa(slots.req_to_token))
            try:
                return forward(self, q, k, v, layer, *args, **kwargs)
            finally:
                self.req_to_token_pool = slots

        return wrapper

    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, reading(getattr(backend, name)))


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _without_pinning,
    "sglang.srt.layers.attention.torch_native_backend": _reading_windows,
}
if "OVERHEAD_FILE" in os.environ:
    import overhead

    CHANGES["kvferry.engines.sglang_classes"] = overhead.watch_kvferry
    CHANGES["sglang.srt.managers.scheduler"] = overhead.watch_scheduler


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            import torch

            sys.meta_path.remove(self)
            _without_operators_of_torchvision(torch)
            sys.meta_path.insert(0, self)
            CHANGES[fullname] = lambda module: None
            return None
        change = CHANGES.get(fullname)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
