"""Move the KV of prompts between two instances, for daemons and for engines that load a connector.

Leader: `outgoing` tracks the transfers of a prefill side; `offered_prompts` adds the prompts of a connector's engine to it.
`incoming` tracks the prompts that a connector's engine fetches. `prefill_service` and `decode_service` serve the calls of the
other tier for a connector; `prefill_calls` serves `Prefill` for daemons, too.
`decode_instances` and `prefill_nodes` track the joined instances.

Rank: `outgoing_rank` and `incoming_rank` send and receive, over the sessions of `transfer.send.attach` and
`transfer.receive.attach`.
`messages` defines the messages between a leader and its ranks.
"""
