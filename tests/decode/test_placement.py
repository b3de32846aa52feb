"""Which prefill node takes a prompt, and what is remembered of prompts that were sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.placement import (
    BLOCK_TOKENS,
    MAX_BLOCKS_OF_A_PROMPT,
    MAX_HOLDERS,
    Candidate,
    PrefixMemory,
    block_hashes,
    place,
)


def node(incarnation: int, outstanding_tokens: int = 0, bandwidth: float = 1e9) -> Candidate:
    return Candidate(incarnation=incarnation, outstanding_tokens=outstanding_tokens, bandwidth_bytes_per_s=bandwidth)


def placed(*nodes: Candidate, held: dict[int, int] | None = None, prefix_tokens: int = 0) -> int:
    return nodes[place(nodes, held_tokens=held or {}, prefix_tokens=prefix_tokens)].incarnation


def test_the_least_work_comes_first_whatever_the_links() -> None:
    assert placed(node(1, 101, 100e9), node(2, 100, 1e9)) == 2


def test_of_equal_work_the_faster_links_and_then_whoever_is_known_for_longest() -> None:
    assert placed(node(1, 7, 1e9), node(2, 7, 3e9), node(3, 7, 2e9)) == 2
    assert placed(node(1), node(2)) == 1


def test_a_prefix_is_worth_as_much_waiting_as_it_saves_and_no_more_than_is_allowed() -> None:
    held = {1: 1024}
    assert placed(node(1, 511), node(2), held=held, prefix_tokens=512) == 1
    assert placed(node(1, 512), node(2), held=held, prefix_tokens=512) == 2, "nothing is won by waiting as long as one computes"
    assert placed(node(1, 200), node(2), held={1: 128}, prefix_tokens=512) == 2, "no more than it is long"
    assert placed(node(1, 1), node(2), held=held) == 2, "off"
    assert placed(node(1, 0, 1e9), node(2, 0, 9e9), held=held, prefix_tokens=512) == 1, "before bandwidth"


@given(
    st.lists(st.builds(node, st.integers(1, 9), st.integers(0, 3000), st.floats(0, 1e11)), min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 9), st.integers(0, 4000)),
    st.integers(0, 1000),
)
def test_nobody_waits_longer_than_is_allowed(nodes: list[Candidate], held: dict[int, int], prefix_tokens: int) -> None:
    chosen = nodes[place(nodes, held_tokens=held, prefix_tokens=prefix_tokens)]
    least = min(one.outstanding_tokens for one in nodes)
    assert chosen.outstanding_tokens - least <= min(prefix_tokens, held.get(chosen.incarnation, 0))


def prompt(num_blocks: int, first: int = 0, extra: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + num_blocks * BLOCK_TOKENS + extra))


def test_a_hash_names_all_tokens_before_it_and_the_salt() -> None:
    whole = block_hashes(prompt(3, extra=5))
    assert len(whole) == 3 and block_hashes(prompt(2)) == whole[:2]
    assert not set(block_hashes(prompt(3), "a")) & set(whole)
    changed = (9, *prompt(3)[1:])
    assert not set(block_hashes(changed)) & set(whole), "a block behind another beginning is another block"
    assert block_hashes(prompt(0, extra=BLOCK_TOKENS - 1)) == ()
    assert len(block_hashes([0xFFFFFFFF] * BLOCK_TOKENS * (MAX_BLOCKS_OF_A_PROMPT + 2))) == MAX_BLOCKS_OF_A_PROMPT


def test_what_was_sent_is_found_as_far_as_a_prompt_begins_alike() -> None:
    memory = PrefixMemory()
    memory.sent(block_hashes(prompt(3)), 1)
    memory.sent(block_hashes(prompt(1)), 2)
    assert memory.held(block_hashes(prompt(5))) == {1: 3 * BLOCK_TOKENS, 2: BLOCK_TOKENS}
    assert memory.held(block_hashes(prompt(2, extra=7))) == {1: 2 * BLOCK_TOKENS, 2: BLOCK_TOKENS}
    assert memory.held(block_hashes(prompt(3, first=1))) == memory.held(()) == {}


def test_a_block_is_remembered_of_a_few_lives() -> None:
    memory = PrefixMemory()
    for life in range(1, MAX_HOLDERS + 3):
        memory.sent(block_hashes(prompt(1)), life)
    assert sorted(memory.held(block_hashes(prompt(1)))) == list(range(3, MAX_HOLDERS + 3)), "the newest"


def test_memory_is_bounded_and_beginnings_outlive_ends() -> None:
    memory = PrefixMemory(max_blocks=4)
    memory.sent(block_hashes(prompt(4)), 1)
    memory.sent(block_hashes(prompt(2, first=5000)), 2)
    assert len(memory) == 4
    assert memory.held(block_hashes(prompt(4))) == {1: 2 * BLOCK_TOKENS}
    assert memory.held(block_hashes(prompt(2, first=5000))) == {2: 2 * BLOCK_TOKENS}
    memory.sent(block_hashes(prompt(50)), 3)
    assert len(memory) == 4 and memory.held(block_hashes(prompt(50)))[3] == 4 * BLOCK_TOKENS
