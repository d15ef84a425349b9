"""A zygote whose supervisors see a wall clock that a test sets: by the milliseconds in ``<data>/clock``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sandkeep.host.native.zygote import main
from sandkeep.shared import clock

DATA = sys.argv[2]
REAL = clock.wall_ms


def jumping() -> int:
    with open(f"{DATA}/clock", encoding="ascii") as handle:
        return REAL() + int(handle.read())


clock.wall_ms = jumping

main(int(sys.argv[1]), DATA, sys.argv[3], int(sys.argv[4]))
