"""The layout of output frames: a process's output, byte for byte, and records between the bytes.

A frame is a header and as many bytes as its length says. Offsets count the bytes of both streams.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

CONTENT_TYPE: Final = "application/x-sandkeep-output"
HEADER: Final = Struct("<IB3xQQ")
"""Length of the payload, kind, time in µs, offset."""
GAP_LENGTH: Final = Struct("<Q")
"""Payload of a gap: how many bytes are missing."""

NOTHING: Final = 0
"""A heartbeat."""
STDOUT: Final = 1
STDERR: Final = 2
GAP: Final = 3
END: Final = 4
RECORD: Final = 5
"""A JSON record that is not output."""
DAMAGED: Final = 6
"""A gap where the log is damaged; 0 bytes long if the missing length is unknown."""

HEARTBEAT: Final = HEADER.pack(0, NOTHING, 0, 0)
