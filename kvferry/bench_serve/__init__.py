"""`kvferry bench serve`: open-loop load on a running cluster, and what came of it."""
