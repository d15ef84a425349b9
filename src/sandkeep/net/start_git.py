"""Script that runs git for a source: find the packages, hand over.

Argument: where the starting program finds its packages.
"""

import sys

sys.path.extend(path for path in sys.argv[1].split(":") if path.startswith("/"))

from sandkeep.net.git import main

main()
