"""A mixed load while every kind of process is killed at random, with everything that was promised checked.

``python -m benchmarks.soak --minutes 20 --seed 1``; ``benchmarks/README.md`` says what it does and checks.
"""
