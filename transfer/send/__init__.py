"""The sending end of a transfer: the state machine, the loop that drives it, and sessions with decode ranks."""
