"""Structure-aware fuzzing of everything that reads what others wrote, and of both protocol machines: see docs/fuzzing.md."""
