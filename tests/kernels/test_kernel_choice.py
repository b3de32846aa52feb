"""The implementation of copies that a rank chooses at its start, and the log line that names it."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from transfer.copy import Kernels, choose_kernels, kernel_choice
from transfer.errors import ConfigError

HOST = torch.device("cpu")
NO_GPU = torch.device("cuda", 99)
"""Triton can compile nothing for it on any machine."""


def test_plain_torch_is_taken_where_triton_does_not_work_and_the_log_says_why() -> None:
    with capture_logs() as lines:
        assert choose_kernels("auto", NO_GPU) is Kernels.TORCH
    (line,) = lines
    assert (line["event"], line["log_level"], line["kernels"], line["device"]) == (
        "triton_unusable",
        "warning",
        "torch",
        "cuda:99",
    )
    assert line["reason"] and "\n" not in line["reason"]
    assert "set kernels to torch" in line["advice"]


def test_a_rank_that_must_have_triton_is_refused_where_it_does_not_work() -> None:
    with pytest.raises(ConfigError, match=r"kernels is triton, and Triton does not work on cuda:99 \(.+\)"):
        choose_kernels("triton", NO_GPU)
    with pytest.raises(ConfigError, match="kernels is triton, and the pool is in host memory"):
        choose_kernels("triton", HOST)


def test_plain_torch_is_taken_without_a_probe() -> None:
    with capture_logs() as lines:
        assert choose_kernels("torch", NO_GPU) is Kernels.TORCH
    assert [(line["event"], line["reason"]) for line in lines] == [("kernels_chosen", "kernels is torch")]
    assert choose_kernels("torch", HOST) is Kernels.TORCH


@pytest.mark.parametrize(("is_built", "kernels"), [(True, Kernels.COMPILED), (False, Kernels.NUMPY)])
def test_numpy_copies_in_host_memory_where_nothing_was_compiled(
    is_built: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "IS_BUILT", is_built)
    choose_kernels.cache_clear()
    with capture_logs() as lines:
        assert choose_kernels("auto", HOST) is choose_kernels("auto", HOST) is kernels
    choose_kernels.cache_clear()
    assert [(line["event"], line["kernels"]) for line in lines] == [("kernels_chosen", kernels)]  # once for each process
