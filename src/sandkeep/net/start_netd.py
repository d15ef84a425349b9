"""Script the netd process runs: find the package, hand over. Argument: data directory."""

import sys

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from sandkeep.net.netd import main

main(sys.argv[1])
