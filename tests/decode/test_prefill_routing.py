"""Which prefill node takes a prompt, and what is remembered of prompts that were sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from transfer.connector.prefill_routing import (
    BLOCK_TOKENS,
    MAX_BLOCKS_OF_A_PROMPT,
    MAX_TOLD_TOKENS,
    Candidate,
    PrefixMemory,
    block_hashes,
    group_of,
    place,
)

CHOOSER = 7


def node(incarnation: int, outstanding_tokens: int = 0, bandwidth: float = 1e9, others: int | None = None) -> Candidate:
    return Candidate(
        incarnation=incarnation,
        outstanding_tokens=outstanding_tokens,
        others_tokens=others,
        bandwidth_bytes_per_s=bandwidth,
    )


def placed(*nodes: Candidate, held: dict[int, int] | None = None, prefix_tokens: int = 0, chooser: int = CHOOSER) -> int:
    return nodes[place(nodes, chooser=chooser, held_tokens=held or {}, prefix_tokens=prefix_tokens)].incarnation


def test_of_equal_work_the_faster_links() -> None:
    assert placed(node(1, 7, 1e9), node(2, 7, 3e9), node(3, 7, 2e9)) == 2
    assert placed(node(1, 7, 1e9, 3), node(2, 0, 3e9, 10), node(3, 8, 9e9, 3)) == 2, "for every request"


def test_tokens_of_other_decode_nodes_count_like_own_ones() -> None:
    assert placed(node(1, 0, 9e9, 101), node(2, 100, 1e9, 0)) == 2
    assert placed(node(1, 50, others=50), node(2, 101, others=0)) == 1
    assert placed(node(1, 0, others=512), node(2, others=0), held={1: 1024}, prefix_tokens=512) == 2
    assert placed(node(1, 0, others=511), node(2, others=0), held={1: 1024}, prefix_tokens=512) == 1


def test_tokens_of_others_count_only_if_all_nodes_report_them() -> None:
    """A node of an older release would look idle to all decode nodes, and get everything."""
    assert placed(node(1, 10, others=10**6), node(2, 11)) == 1
    assert placed(node(1, 10, others=10**6), node(2, 9)) == 2
    assert placed(node(1, 10, others=10**6), node(2, 11, others=0)) == 2


def test_where_links_are_alike_each_decode_node_has_an_order_of_its_own_and_keeps_it() -> None:
    nodes = [node(0x1000 + number, others=0) for number in range(8)]
    first = Counter(placed(*nodes, chooser=chooser) for chooser in range(1, 8001))
    assert set(first) == {one.incarnation for one in nodes}
    assert all(850 < count < 1150 for count in first.values()), first
    order = []
    while nodes:
        order.append(placed(*nodes))
        assert placed(*reversed(nodes)) == order[-1], "in whatever order they are known"
        nodes = [one for one in nodes if one.incarnation != order[-1]]
    assert len(set(order)) == 8


def test_a_prefix_is_worth_as_much_waiting_as_it_saves_and_no_more_than_is_allowed() -> None:
    held = {1: 1024}
    assert placed(node(1, 511), node(2), held=held, prefix_tokens=512) == 1
    assert placed(node(1, 512), node(2), held=held, prefix_tokens=512) == 2, "nothing is won by waiting as long as one computes"
    assert placed(node(1, 200), node(2), held={1: 128}, prefix_tokens=512) == 2, "no more than it is long"
    assert placed(node(1, 1), node(2), held=held) == 2, "off"
    assert placed(node(1, 0, 1e9), node(2, 0, 9e9), held=held, prefix_tokens=512) == 1, "before bandwidth"


LIVES = st.integers(1, (1 << 64) - 1)
NODES = st.builds(
    node,
    st.integers(1, 9),
    st.integers(0, 3000),
    st.sampled_from([0.0, 1e9, 1e11]),
    st.none() | st.integers(0, 3000) | st.just(MAX_TOLD_TOKENS),
)


@given(
    st.lists(NODES, min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 9), st.integers(0, 4000)),
    st.integers(0, 1000),
    LIVES,
)
def test_nobody_waits_longer_than_is_allowed(
    nodes: list[Candidate], held: dict[int, int], prefix_tokens: int, chooser: int
) -> None:
    chosen = nodes[place(nodes, chooser=chooser, held_tokens=held, prefix_tokens=prefix_tokens)]
    have_told = all(one.others_tokens is not None for one in nodes)
    work = {id(one): one.outstanding_tokens + ((one.others_tokens or 0) if have_told else 0) for one in nodes}
    assert work[id(chosen)] - min(work.values()) <= min(prefix_tokens, held.get(chosen.incarnation, 0))


@given(st.lists(NODES, min_size=1, max_size=6, unique_by=lambda one: one.incarnation), LIVES, st.data())
def test_the_order_in_which_nodes_are_known_does_not_count(nodes: list[Candidate], chooser: int, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(nodes))
    assert placed(*nodes, chooser=chooser) == placed(*shuffled, chooser=chooser)


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    st.lists(st.integers(0, MAX_TOLD_TOKENS), min_size=2, max_size=5),
    LIVES,
)
def test_whatever_is_told_each_prompt_goes_where_there_was_least_and_counts_there_at_once(
    prompts: list[int], told: list[int], chooser: int
) -> None:
    """Between two heartbeats: of nodes that got any, none ends up with more than a prompt more than any other has."""
    nodes = [node(number, others=one) for number, one in enumerate(told, 1)]
    for tokens in prompts:
        index = place(nodes, chooser=chooser, held_tokens={}, prefix_tokens=0)
        nodes[index] = replace(nodes[index], outstanding_tokens=nodes[index].outstanding_tokens + tokens)
    work = [one.outstanding_tokens + (one.others_tokens or 0) for one in nodes]
    given_any = [its_work for its_work, one in zip(work, nodes, strict=True) if one.outstanding_tokens]
    assert max(given_any) - min(work) <= max(prompts)


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


def test_memory_is_bounded_and_beginnings_outlive_ends() -> None:
    memory = PrefixMemory(max_blocks=4)
    memory.sent(block_hashes(prompt(4)), 1)
    memory.sent(block_hashes(prompt(2, first=5000)), 2)
    assert len(memory) == 4
    assert memory.held(block_hashes(prompt(4))) == {1: 2 * BLOCK_TOKENS}
    assert memory.held(block_hashes(prompt(2, first=5000))) == {2: 2 * BLOCK_TOKENS}
    memory.sent(block_hashes(prompt(50)), 3)
    assert len(memory) == 4 and memory.held(block_hashes(prompt(50)))[3] == 4 * BLOCK_TOKENS


def test_each_decode_node_joins_others_and_every_prefill_node_has_some() -> None:
    nodes = [f"10.0.{number // 256}.{number % 256}:7100" for number in range(256)]
    groups = [group_of(nodes, chooser=f"10.1.0.{number}:7100", size=32) for number in range(256)]
    assert all(len(group) == 32 and group == sorted(group, key=nodes.index) for group in groups)
    joins = Counter(node for group in groups for node in group)
    assert set(joins) == set(nodes) and max(joins.values()) < 2 * 32, "32 on average"
    assert group_of(nodes, chooser="10.1.0.7:7100", size=32) == groups[7], "also after a restart"


def test_a_group_changes_only_by_who_left_and_who_took_the_place() -> None:
    nodes = [f"prefill-{number}:1" for number in range(100)]
    group = group_of(nodes, chooser="decode:1", size=10)
    for gone in nodes:
        left = group_of([node for node in nodes if node != gone], chooser="decode:1", size=10)
        assert len(set(left) - set(group)) == (gone in group) and len(left) == 10
    assert set(group_of([*nodes, "new:1"], chooser="decode:1", size=10)) <= {*group, "new:1"}


def test_a_group_is_everybody_where_there_are_no_more() -> None:
    nodes = ["b:1", "a:1"]
    assert [group_of(nodes, chooser="d:1", size=size) for size in (None, 2, 3)] == [nodes] * 3
    assert len(group_of(nodes, chooser="d:1", size=1)) == 1
