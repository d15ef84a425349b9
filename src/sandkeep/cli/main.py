"""Entry point of ``sandkeep``.

``--help`` and ``version`` need neither click nor the SDK, so that they are fast. Everything else goes to the
command tree in :mod:`sandkeep.cli.tree`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sandkeep.version import __version__

TYPE_CHECKING = False  # see sandkeep/__init__.py

if TYPE_CHECKING:
    from typing import NoReturn


def program() -> NoReturn:
    """Run the command line of this process, and end the process with its status.

    It ends without taking the interpreter apart, which takes 10 ms: commands close what they opened, and the
    kernel frees the memory. A server, and a program that is profiled or traced, have work left at that point.
    """
    status = main()
    if "serve" not in sys.argv and sys.getprofile() is None and sys.gettrace() is None:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # as it is for a descriptor that was closed at the start
                    stream.flush()
        except (OSError, ValueError):
            pass  # sys.exit() tries again, and reports it
        else:
            os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    if "_SANDKEEP_COMPLETE" in os.environ:
        from sandkeep.cli.tree import complete

        return complete()
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in (["-V"], ["--version"]):
        args[0] = "version"
    if args == ["version"]:
        print(f"sandkeep {__version__}")
        return 0
    if args in (["-h"], ["--help"], ["help"]):
        from sandkeep.cli.table import usage

        print(usage())
        return 0
    try:
        from sandkeep.cli.tree import run

        return run(args)
    except KeyboardInterrupt:
        return 130
