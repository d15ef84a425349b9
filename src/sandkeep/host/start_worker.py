"""Script of the worker process: find the package, call ``main``. Arguments: data directory, mode."""

import sys

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from sandkeep.host.worker import main

main()
