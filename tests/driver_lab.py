"""Real sessions for tests, without an event loop in sight.

``Lab`` owns a driver and a worker on a data directory and offers blocking calls. Used by tests directly under
root and, through ``User.call``, in a process of an ordinary user, so that one test body covers every mode.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandkeep.errors import SandkeepError
from sandkeep.host.driver import Acting, Created, Limits, ProcessSpec, SessionRef, SessionSpec, WriteOptions
from sandkeep.host.layers.values import Layer
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.native.messages import NativeState
from sandkeep.host.native.mode import Mode
from sandkeep.host.reports import ProcessRecord
from sandkeep.host.rootfs import Rootfs
from sandkeep.host.storage import Storage
from sandkeep.linux.overlay import Way
from sandkeep.shared.outputlog import STDERR, STDOUT, Chunk, Gap, Item

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A finished process: its record and everything it printed."""

    record: ProcessRecord
    items: list[Item] = field(repr=False)

    def _stream(self, stream: int) -> bytes:
        return b"".join(i.data for i in self.items if isinstance(i, Chunk) and i.stream == stream)

    @property
    def stdout(self) -> str:
        return self._stream(STDOUT).decode(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        return self._stream(STDERR).decode(errors="surrogateescape")

    @property
    def output(self) -> bytes:
        return b"".join(i.data for i in self.items if isinstance(i, Chunk))

    @property
    def gaps(self) -> list[Gap]:
        return [i for i in self.items if isinstance(i, Gap)]

    @property
    def code(self) -> int | None:
        return self.record.exit_code


class Box:
    """One session under test."""

    _names = itertools.count(1)

    def __init__(self, lab: Lab, ref: SessionRef, state: NativeState, rootfs: Rootfs) -> None:
        self.lab = lab
        self.ref = ref
        self.created = state
        self.rootfs = rootfs
        self.directory = f"{lab.driver.data_dir}/sessions/{ref.session}"

    def start(self, *argv: str, **options: Any) -> str:
        """Start a process and return its name; options as in ``ProcessSpec``."""
        process = options.pop("process", None) or f"p{next(self._names)}"
        self.lab.do(self.lab.driver.start_process(self.ref, ProcessSpec(process, argv, **options)))
        return str(process)

    def finish(self, process: str, *, timeout: float = 60) -> Result:
        """Follow a process to its end."""
        items = self.lab.do(asyncio.wait_for(self._collect(process), timeout))
        return Result(self.lab.do(self.lab.driver.process(self.ref, process)), items)

    async def _collect(self, process: str) -> list[Item]:
        return [item async for item in self.lab.driver.output(self.ref, process)]

    def run(self, *argv: str, timeout: float = 60, **options: Any) -> Result:
        return self.finish(self.start(*argv, **options), timeout=timeout)

    def sh(self, script: str, **options: Any) -> Result:
        return self.run("bash", "-c", script, **options)

    def output(self, process: str, offset: int = 0) -> list[Item]:
        """What is in the log now, without following."""

        async def collect() -> list[Item]:
            read = self.lab.driver.output(self.ref, process, offset=offset, follow=False)
            return [item async for item in read]

        return self.lab.do(collect())

    def write(self, path: str, data: bytes, **options: Any) -> int:
        """Write a file; options as in ``WriteOptions`` and ``Acting``."""

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 1 << 20):
                yield data[start : start + (1 << 20)]

        acting = _acting(options)
        files = self.lab.driver.files(self.ref)
        return self.lab.do(files.write(path, pieces(), acting, WriteOptions(**options)))

    def read(self, path: str, **options: Any) -> bytes:
        async def collect() -> bytes:
            opened = await self.lab.driver.files(self.ref).open_read(path, _acting(options), **options)
            async with aclosing(opened):
                return b"".join([piece async for piece in opened.pieces()])

        return self.lab.do(collect())

    def files(self, operation: str, **options: Any) -> Any:
        """Do one of the operations of `sandkeep.host.driver.Files`; options also as in ``Acting``."""
        method = getattr(self.lab.driver.files(self.ref), operation)
        return self.lab.do(method(acting=_acting(options), **options))

    def state(self) -> NativeState:
        return self.lab.do(self.lab.driver.state(self.ref))

    def stop(self, **options: Any) -> NativeState:
        return self.lab.do(self.lab.driver.stop(self.ref, reason="test", **options))

    def remove(self) -> None:
        """Stop the session, if it runs, and leave nothing of it."""
        self.stop()
        self.lab.do(self.lab.driver.forget(self.ref))
        self.lab.do(self.lab.storage.remove_session(self.ref.session))
        self.lab.boxes.remove(self)

    def publish(self, layer: str, *, parent: str | None = None) -> Layer:
        """Make the stopped session's files a layer."""
        return self.lab.do(
            self.lab.storage.publish_layer(
                self.ref.session,
                layer_id=layer,
                parent_id=parent,
                image=self.rootfs.image,
                host_key=self.rootfs.host_key,
            )
        )


def created(made: Created) -> NativeState:
    """The state of a new session, with what only the native driver knows."""
    assert isinstance(made.state, NativeState)
    return made.state


def _acting(options: dict[str, Any]) -> Acting:
    """Take the fields of ``Acting`` out of options."""
    return Acting(**{name: options.pop(name) for name in ("user", "root", "cwd") if name in options})


class Lab:
    def __init__(self, data_dir: str, mode: Mode | None = None, way: Way | None = None) -> None:
        """``way`` is how overlays are mounted; the newest that works where none is given."""
        self._runner = asyncio.Runner()
        self.data_dir = data_dir
        self._names = itertools.count(1)
        self.boxes: list[Box] = []
        self.driver: NativeDriver = self.do(self._make(data_dir, mode, way))
        self.storage = Storage(self.driver)

    async def _make(self, data_dir: str, mode: Mode | None, way: Way | None) -> NativeDriver:
        driver = NativeDriver(data_dir, mode=mode, way=way)
        await driver.start()
        return driver

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def do(self, work: Awaitable[T]) -> T:
        async def wrap() -> T:
            return await work

        return self._runner.run(wrap())

    def box(
        self,
        *,
        image: str = "host",
        layer: str | None = None,
        name: str | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> Box:
        """A running session; stopped and removed when the lab closes."""
        rootfs, _ = self.do(self.storage.rootfs(image, layer_id=layer))
        session = name or f"s{next(self._names)}"
        spec = SessionSpec(session=session, rootfs=rootfs, layer=layer, limits=limits or Limits(), **options)
        state = created(self.do(self.driver.create(spec)))
        box = Box(self, SessionRef(self.driver.host, session, spec.generation), state, rootfs)
        self.boxes.append(box)
        return box

    def adopt(self, session: str, image: str = "host") -> Box:
        """A session somebody else started on this data directory."""
        rootfs, _ = self.do(self.storage.rootfs(image))
        box = Box(self, SessionRef(self.driver.host, session), NativeState(status="running"), rootfs)
        self.boxes.append(box)
        return box

    def detach(self) -> None:
        """Go away and leave sessions running, as a caller that ends does."""
        self.do(self._detach())
        self._runner.close()

    async def _detach(self) -> None:
        await self.storage.close()
        await self.driver.close()

    def close(self) -> None:
        for box in self.boxes:
            try:
                box.stop()
                self.do(self.driver.forget(box.ref))
                self.do(self.storage.remove_session(box.ref.session))
            except SandkeepError:
                pass
        self.detach()
