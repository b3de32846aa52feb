"""Both tiers on this machine, as processes of their own: for the demo, tests and benchmarks."""
