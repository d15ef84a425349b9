"""What happens when a sandbox's session has ended under an operation: resume once, replay once.

Whoever finds the session gone resumes the sandbox; callers that find the same at the same time wait for that
one resume and use its session. The operation is then carried out again, once: it was refused before, so
nothing happened. A second refusal is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from sandkeep.errors import SessionSnapshotting, SessionStopped, SessionStopping
from sandkeep.sdk.concurrent import Lock

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("sandkeep_inside_resume", default=False)
"""Set while a resume runs, with its hook: what is done in there must not wait for it."""


class Recovery:
    """The current session of one sandbox handle, and how to get another."""

    def __init__(self, session: str, resume: Callable[[], Awaitable[str]]) -> None:
        """``resume`` starts a session when none runs, tells whoever wants to know, and returns its id."""
        self.session: str = session
        self.pinned = False
        """Inside a resume scope: operations are for its session and for no later one."""
        self._resume = resume
        self._lock = Lock()

    async def run(self, operation: Callable[[str], Awaitable[T]]) -> T:
        """Carry out something in the current session, given its id.

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
        """A session later than ``ended``."""
        async with self._lock:
            if self.session == ended:
                token = _inside.set(True)
                try:
                    self.session = await self._resume()
                finally:
                    _inside.reset(token)
            return self.session
