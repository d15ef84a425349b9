"""The version of this package, for every part that reports it."""

__version__ = "0.1.0"
