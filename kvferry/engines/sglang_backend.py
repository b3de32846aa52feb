"""SGLang's disaggregation through kvferry: ``--disaggregation-transfer-backend kvferry`` on both engines.

SGLang calls `activate` by the entry point group ``sglang.srt.plugins``, in each of its processes and for every backend. It only
adds a name and hooks. `kvferry.engines.sglang_classes` has the backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from transfer.errors import ConfigError

BACKEND: Final = "kvferry"
TESTED_VERSIONS: Final = ("0.5.23",)
ANY_VERSION: Final = "SGLANG_KVFERRY_ANY_VERSION"
"""Environment variable that allows untested versions of SGLang."""

GET_CLASS: Final = "sglang.srt.disaggregation.utils.get_kv_class"
SCHEDULER: Final = {
    # A scheduler makes its manager. The queue has the pool's tensors, the manager gets only their addresses.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": "making_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": "making_manager",
    # A scheduler makes a sender or a receiver. The request has the prompt's tokens, which those do not get.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": "made_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": "made_receiver",
}

HND_ADDRESSES: Final = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_contiguous_buf_infos"
"""SGLang refuses pools with heads before tokens (``SGLANG_USE_HND_KVCACHE``) here, for backends that need the addresses."""


def activate() -> None:
    """Add the backend to SGLang. Called by the entry point."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    _add_member(utils.TransferBackend)
    HookRegistry.register(GET_CLASS, _get_kv_class, HookType.AROUND)
    for target, name in SCHEDULER.items():
        # Only a process with a scheduler has loaded these. In others the import would take seconds.
        if target.rsplit(".", 2)[0] in sys.modules:
            HookRegistry.register(target, _later(name), HookType.AROUND)
    if HND_ADDRESSES.rsplit(".", 2)[0] in sys.modules:
        HookRegistry.register(HND_ADDRESSES, _addresses, HookType.AROUND)


def check_version() -> None:
    """Reject an untested version of SGLang.

    Raises:
        ConfigError: The version is untested, and `ANY_VERSION` is not set.
    """
    found = version("sglang")
    if found not in TESTED_VERSIONS and not os.environ.get(ANY_VERSION):
        raise ConfigError(
            f"sglang is {found}; kvferry's backend was tested with {', '.join(TESTED_VERSIONS)} ({ANY_VERSION}=1 takes any)"
        )


def _add_member(backends: Any) -> None:
    """Add the backend to SGLang's enum of backends, which has no interface for that."""
    member = object.__new__(backends)
    member._name_, member._value_, member._sort_order_ = BACKEND.upper(), BACKEND, len(backends)
    member.__objclass__ = backends
    backends._member_map_[member._name_] = member
    backends._value2member_map_[BACKEND] = member
    backends._member_names_.append(member._name_)


def _get_kv_class(original: Callable[[Any, Any], Any], transfer_backend: Any, class_type: Any) -> Any:
    if getattr(transfer_backend, "value", None) != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    check_version()
    from kvferry.engines import sglang_classes

    return sglang_classes.CLASSES[class_type.value]


def _later(name: str) -> Callable[..., Any]:
    """Return a hook that calls a function of `sglang_classes`, which is loaded only if the backend is used."""

    def hook(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.transfer_backend.value != BACKEND:
            return original(queue, *args, **kwargs)
        from kvferry.engines import sglang_classes

        return getattr(sglang_classes, name)(original, queue, *args, **kwargs)

    return hook


def _addresses(original: Callable[[Any], Any], pool: Any) -> Any:
    """Return the addresses and sizes of a pool's layers and pages, which SGLang passes to a manager."""
    classes = sys.modules.get("kvferry.engines.sglang_classes")
    if classes is None or not classes.is_making_manager() or not pool.use_hnd:
        return original(pool)
    from kvferry.engines.sglang_layout import page_addresses

    return page_addresses(pool)
