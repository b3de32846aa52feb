"""The command line: options, settings of clients, and the commands that call a node."""
