"""Script that measures and removes files with the rights of their owner. Argument: the mode."""

import sys

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from sandkeep.host.remover import main

main(sys.argv[1])
