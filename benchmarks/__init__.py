"""How fast sandkeep is, as ratios to what the same machine does without it. Start with ``benchmarks/run``."""
