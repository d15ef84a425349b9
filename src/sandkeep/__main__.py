"""``python -m sandkeep``."""

from sandkeep.cli.main import program

program()
