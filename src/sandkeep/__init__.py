"""Named Linux sandboxes that keep their files between runs.

The package root imports nothing: the zygote and every supervisor import from below it and must stay small.
"""

__version__ = "0.1.0"
