"""Script the netd process runs: find the packages, hand over.

Arguments: data directory, and where the starting program finds its packages.
"""

import sys

sys.path.extend(path for path in sys.argv[2].split(":") if path.startswith("/"))

from sandkeep.net.netd import main

main(sys.argv[1])
