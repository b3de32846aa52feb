"""What both daemons share: rank processes, the leader's link to them, worker threads, health endpoints and the life of a node."""
