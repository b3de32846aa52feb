"""The composition root: command line, local cluster and demo."""
