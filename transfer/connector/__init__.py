"""Moves the KV of prompts between two instances.

`outgoing` and `incoming` are the prompts that an engine computes or fetches, as the instance's leader sees them; `outgoing_rank`
and `incoming_rank` are their parts in each rank. `decode_instances` and `prefill_nodes` keep who has joined. `prefill_service`
and `decode_service` serve what the other tier calls.
"""
