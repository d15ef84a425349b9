"""Bodies that name a path inside a sandbox: apart from the other bodies, which the SDK does not need."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from sandkeep.checks import byte_length, refuse
from sandkeep.wire.base import Body

MAX_PATH = 4095


class ReadBody(Body, kw_only=True, frozen=True):
    path: str
    cwd: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_path("cwd", self.cwd)


def check_path(field_path: str, path: str | UnsetType) -> None:
    """Refuse a path that the kernel would."""
    if isinstance(path, UnsetType):
        return
    if not path:
        refuse(field_path, "must not be empty")
    if "\0" in path:
        refuse(field_path, "must not contain a NUL character")
    if byte_length(field_path, path) > MAX_PATH:
        refuse(field_path, f"must be at most {MAX_PATH} bytes")
