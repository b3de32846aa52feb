"""The command line: options, settings of clients, exit codes, and the commands that call a node."""
