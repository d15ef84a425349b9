"""Recovery of an operation whose session has ended: resume the sandbox once, replay the operation once.

The first caller that finds the session gone resumes the sandbox; callers that find the same wait for that
resume and use its session. The operation is then repeated once, which is safe because it was refused
before. A second refusal is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from sandkeep.errors import SessionSnapshotting, SessionStopped, SessionStopping
from sandkeep.sdk._compat_async import Lock

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("sandkeep_inside_resume", default=False)
"""Set while a resume runs, with its hook: operations of the hook must not wait for that resume."""


class Recovery:
    """The current session of one sandbox handle, and how to start another."""

    def __init__(self, session: str, resume: Callable[[], Awaitable[str]]) -> None:
        """``resume`` starts a session if none runs, calls the hook, and returns the session's id."""
        self.session: str = session
        self.pinned = False
        """Inside a resume scope: operations use its session and never a later one."""
        self._resume = resume
        self._lock = Lock()

    async def run(self, operation: Callable[[str], Awaitable[T]]) -> T:
        """Call ``operation`` with the id of the current session.

        Raises:
            SessionStopped: the session has ended and the handle is pinned to it, or it ended again at once.
        """
        session = self.session
        try:
            return await operation(session)
        except (SessionStopped, SessionStopping, SessionSnapshotting):
            if self.pinned or _inside.get():
                raise
        return await operation(await self._after(session))

    async def _after(self, ended: str) -> str:
        """Return the id of a session later than ``ended``."""
        async with self._lock:
            if self.session == ended:
                token = _inside.set(True)
                try:
                    self.session = await self._resume()
                finally:
                    _inside.reset(token)
            return self.session
