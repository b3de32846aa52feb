"""`kvferry top`: the state of a cluster, live on a terminal or once."""
