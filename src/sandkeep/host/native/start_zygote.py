"""Script of the zygote process: find the package, call ``main``.

Arguments: control descriptor, data directory, mode, size of the pool, and for tests how to mount overlays.
"""

import sys

sys.path.insert(0, __file__.rsplit("/", 4)[0])

from sandkeep.host.native.zygote import main

main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])  # type: ignore[arg-type]
