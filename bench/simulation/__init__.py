"""A two-tier cluster as discrete events: what `bench.simulate` runs. Standard library and kvferry's own pure parts only."""
