"""Script the worker process runs: find the package, hand over. Arguments: data directory, mode."""

import sys

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from sandkeep.host.worker import main

main()
