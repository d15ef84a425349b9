"""The command line: one file per noun, assembled in ``main``."""
