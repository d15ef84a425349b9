"""Recovery of an operation whose session has ended: resume the sandbox once, replay the operation once.

The first caller that finds the session gone asks whether a new one may be started, and resumes the sandbox;
callers that find the same wait for that resume and use its session. The operation is then repeated once,
which is safe because it was refused before. A second refusal is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from sandkeep.checks import expect
from sandkeep.errors import SessionSnapshotting, SessionStopped, SessionStopping, WrongState
from sandkeep.sdk._compat_async import Lock

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("sandkeep_inside_resume", default=False)
"""Set while a resume runs, with its hook: operations of the hook must not wait for that resume."""


def checked_auto_resume(auto_resume: bool | None) -> bool | None:
    """Return the argument ``auto_resume`` if it is a valid one."""
    if auto_resume is not None:
        expect("auto_resume", auto_resume, bool, "True, False or None")
    return auto_resume


class Recovery:
    """The current session of one sandbox handle, and how to start another."""

    def __init__(
        self,
        session: str,
        resume: Callable[[], Awaitable[str]],
        allow: Callable[[WrongState], Awaitable[None]],
    ) -> None:
        """
        Args:
            session: id of the current session.
            resume: starts a session if none runs, calls the hook, and returns the session's id.
            allow: given the refusal, raises ``SessionStopped`` if operations may not start a session.
        """
        self.session: str = session
        self.pinned = False
        """Inside a resume scope: operations use its session and never a later one."""
        self._resume = resume
        self._allow = allow
        self._lock = Lock()

    async def run(self, operation: Callable[[str], Awaitable[T]]) -> T:
        """Call ``operation`` with the id of the current session.

        Raises:
            SessionStopped: the session has ended and the handle may not start another, or is pinned to it,
                or the new one ended again at once.
        """
        session = self.session
        try:
            return await operation(session)
        except (SessionStopped, SessionStopping, SessionSnapshotting) as error:
            if self.pinned or _inside.get():
                raise
            refused = error
        return await operation(await self._after(session, refused))

    async def _after(self, ended: str, refused: WrongState) -> str:
        """Return the id of a session later than ``ended``, which refused an operation."""
        async with self._lock:
            if self.session == ended:
                await self._allow(refused)
                token = _inside.set(True)
                try:
                    self.session = await self._resume()
                finally:
                    _inside.reset(token)
            return self.session
