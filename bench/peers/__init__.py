"""What others offer for the same job, through their own plain API: measured beside kvferry in the same run, no part of it."""
