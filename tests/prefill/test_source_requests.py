"""What a hosted prefill side tells decode instances of each other's prompts."""

from __future__ import annotations

from prefill_node.joins import Join
from prefill_node.source_requests import SourceRequests
from tests.decode.leader_world import turns
from tests.prefill.leader_world import new_join
from transfer.config.hosted import HostedLimitsConfig
from transfer.engine_types import GREEDY
from transfer.errors import PeerUnreachable, TransferAborted


async def test_a_decode_instance_is_told_of_the_tokens_of_others_until_they_are_sent() -> None:
    async def never(join: Join, transfer_id: str) -> bool:
        return False

    requests = SourceRequests(
        num_ranks=1,
        limits=HostedLimitsConfig(),
        broadcast=lambda message: None,
        reserve=never,
        on_outcome=lambda outcome: None,
    )
    mine, other = new_join(5), new_join(6)
    first = requests.submit("a.1", "a", (1, 2, 3), 0, GREEDY, mine)
    requests.submit("b.1", "b", (1,) * 10, 0, GREEDY, other)
    await turns()
    assert [requests.others_tokens(join) for join in (mine, other, new_join(6), new_join(7))] == [10, 3, 3, 13]
    requests.give_up(first, TransferAborted("given up"))
    assert [requests.others_tokens(join) for join in (mine, other)] == [10, 0]
    requests.abort_join(other, PeerUnreachable("gone"))
    assert requests.others_tokens(mine) == 0
    await requests.close(PeerUnreachable("the test is over"))
