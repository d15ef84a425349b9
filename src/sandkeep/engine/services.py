"""The part of `Context` that the objects it constructs may use.

A protocol rather than the class, so that those parts do not import the module that constructs them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from sandkeep.engine.activity import Activity
from sandkeep.engine.settings import Settings
from sandkeep.host.driver import Driver, SessionRef
from sandkeep.store import Store
from sandkeep.store.rows import Session

T = TypeVar("T")


class Services(Protocol):
    """Store, host, settings, clock and log of an engine."""

    data_dir: str
    store: Store
    driver: Driver
    activity: Activity
    settings: Settings
    log: Callable[..., None]

    def now_ms(self) -> int: ...
    def ref(self, session: Session) -> SessionRef: ...
    def record(
        self,
        kind: str,
        project: str,
        *,
        sandbox: tuple[str | None, str | None] = (None, None),
        session: str | None = None,
        actor: str | None = None,
        **data: Any,
    ) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, T], name: str, /) -> Any: ...
