"""``python -m sandkeep``."""

import sys

from sandkeep.cli.main import main

sys.exit(main())
