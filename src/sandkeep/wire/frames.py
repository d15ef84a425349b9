"""The layout of output frames: a process's output, byte for byte, with what belongs between the bytes.

A frame is a header and as many bytes as its length says. Offsets count the bytes of both streams.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

CONTENT_TYPE: Final = "application/x-sandkeep-output"
HEADER: Final = Struct("<IB3xQQ")
"""Length of what follows, kind, time in µs, offset."""
GAP_LENGTH: Final = Struct("<Q")
"""What follows in a gap: how many bytes were dropped there."""

NOTHING: Final = 0
"""A sign of life."""
STDOUT: Final = 1
STDERR: Final = 2
GAP: Final = 3
END: Final = 4
RECORD: Final = 5
"""Something in JSON that is not output."""

HEARTBEAT: Final = HEADER.pack(0, NOTHING, 0, 0)
