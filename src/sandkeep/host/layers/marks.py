"""The references to a layer, as empty files in its directory.

::

    refs/<holder>      a snapshot, drive or session refers to the layer
    refs/@fold         a fold reads the layer
    released           a holder released the last reference: the layer may be deleted
    set-aside          no holder refers to the layer, but none released it; since the file's own time
    doubt-<holder>     the store does not know this holder; since the file's own time

The last reference is ended by renaming its file, which works on a full disk too. Callers hold the store's
lock.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

KEPT_MS: Final = 7 * 24 * 60 * 60 * 1000
"""How long a layer that has lost its references is set aside."""
_REFS: Final = "refs"
_FOLD: Final = "@fold"
_RELEASED: Final = "released"
_SET_ASIDE: Final = "set-aside"


class Marks:
    """The references of one layer, whose record may be damaged."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def _path(self, *names: str) -> str:
        return os.path.join(self._directory, *names)

    def holders(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self._path(_REFS))))
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def hold(self, holder: str) -> None:
        self._add(holder)
        for mark in (_RELEASED, _SET_ASIDE, _doubt(holder)):
            _remove(self._path(mark))

    def restore(self, holder: str) -> bool:
        """Add a reference that should exist; return whether it was missing."""
        lost = holder not in self.holders()
        if lost:
            self.hold(holder)
        else:
            _remove(self._path(_doubt(holder)))
        return lost

    def release(self, holder: str) -> None:
        others = [other for other in self.holders() if other not in (holder, _FOLD)]
        _remove(self._path(_doubt(holder)))
        if others:
            _remove(self._path(_REFS, holder))
            return
        try:
            os.rename(self._path(_REFS, holder), self._path(_RELEASED))
        except (FileNotFoundError, NotADirectoryError):
            self.let_go()

    def let_go(self) -> None:
        """Mark the layer as released. References that exist stay."""
        with suppress(OSError):  # without room for the mark the layer is only deleted later
            _touch(self._path(_RELEASED))

    def hold_for_fold(self) -> None:
        self._add(_FOLD)

    def release_from_fold(self) -> None:
        _remove(self._path(_REFS, _FOLD))

    def _add(self, holder: str) -> None:
        os.makedirs(self._path(_REFS), mode=0o700, exist_ok=True)
        _touch(self._path(_REFS, holder))

    @property
    def released(self) -> bool:
        return os.path.lexists(self._path(_RELEASED))

    def may_go(self, *, keep_ms: int, now_ms: int) -> bool:
        """Return whether a layer that nothing needs may be deleted now."""
        if self.released:
            return True
        since = _since(self._path(_SET_ASIDE))
        return since is not None and now_ms - since >= keep_ms

    def set_aside(self) -> bool:
        """Set the layer aside, from now on; return ``False`` if it was set aside before."""
        return self._begin(_SET_ASIDE)

    def set_aside_since_ms(self) -> int | None:
        """Return since when the layer is set aside; ``None`` if it is not."""
        return _since(self._path(_SET_ASIDE))

    def doubt(self, holder: str, *, keep_ms: int, now_ms: int) -> tuple[bool, bool]:
        """Mark a holder as unknown; return whether that is new, and whether its reference has ended."""
        if self._begin(_doubt(holder)):
            return True, False
        since = _since(self._path(_doubt(holder)))
        if since is None or now_ms - since < keep_ms:
            return False, False
        self.release(holder)
        return False, True

    def _begin(self, mark: str) -> bool:
        if os.path.lexists(self._path(mark)):
            return False
        with suppress(OSError):  # on a full disk the next call starts it
            _touch(self._path(mark))
        return True


def _doubt(holder: str) -> str:
    return f"doubt-{holder}"


def _since(path: str) -> int | None:
    try:
        return os.lstat(path).st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
