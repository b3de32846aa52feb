"""A job is done when the last rank has done it, and fails where any rank failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.offload.jobs import Jobs
from transfer.errors import LocalProtocolError


@given(
    answers=st.lists(st.frozensets(st.integers(0, 9)), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_done_once_with_what_any_rank_failed_at(answers: list[frozenset[int]], order: object) -> None:
    jobs, heard = Jobs(len(answers)), []
    number = jobs.begin(heard.append)
    ranks = list(range(len(answers)))
    order.shuffle(ranks)  # type: ignore[attr-defined]
    for rank in ranks:
        assert not heard and len(jobs) == 1
        jobs.done(rank, number, answers[rank])
    assert heard == [frozenset().union(*answers)]
    assert len(jobs) == 0


def test_a_rank_does_a_job_once_and_only_what_it_was_given() -> None:
    jobs = Jobs(2)
    number = jobs.begin(lambda _: None)
    jobs.done(1, number)
    with pytest.raises(LocalProtocolError, match=f"rank 1 has done job {number}, which it does not have"):
        jobs.done(1, number)
    with pytest.raises(LocalProtocolError, match="rank 0 has done job 77"):
        jobs.done(0, 77)
