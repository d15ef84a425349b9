"""Several sandboxes that one request made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from sandkeep.sdk._async.sandbox import Sandbox


class SandboxBatch(Sequence["Sandbox"]):
    """Sandboxes that were made together, as a sequence. Made by ``create_many`` and ``fork(count=…)``.

    Leaving ``async with`` does to each of them what leaving its own would do, and the handles stay usable as
    any others.
    """

    def __init__(self, boxes: Sequence[Sandbox]) -> None:
        self._boxes = tuple(boxes)

    def __repr__(self) -> str:
        return f"<SandboxBatch {' '.join(box.name for box in self._boxes)}>"

    def __len__(self) -> int:
        return len(self._boxes)

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self._boxes)

    @overload
    def __getitem__(self, index: int) -> Sandbox: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sandbox, ...]: ...

    def __getitem__(self, index: int | slice) -> Sandbox | tuple[Sandbox, ...]:
        return self._boxes[index]

    async def __aenter__(self) -> SandboxBatch:
        for box in self._boxes:
            await box.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure: BaseException | None = None
        for box in self._boxes:
            try:
                # A failed clean-up is a note of the error that ends the block; without one it is raised.
                await box.__aexit__(kind, error or failure, trace)
            except BaseException as refused:
                failure = failure or refused
        if failure is not None:
            raise failure
