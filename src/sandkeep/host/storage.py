"""Images and layers for event loops: a typed client of the worker process.

Each method of `Storage` is one operation of `sandkeep.host.worker.Worker`, with the same name and the same
parameters; a test compares the two. JSON exists between the two processes only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from sandkeep.errors import NotFound, TransportError
from sandkeep.host.channel import Channel
from sandkeep.host.images.allowance import UNLIMITED, Allowance
from sandkeep.host.images.image import Image, ImportKind
from sandkeep.host.images.registry import Progress
from sandkeep.host.images.transport import OPERATOR, Access
from sandkeep.host.layers.marks import KEPT_MS
from sandkeep.host.layers.sessions import SpecOutline
from sandkeep.host.layers.values import Doubt, DriveContent, Examined, Layer, Recovered, Swept
from sandkeep.host.rootfs import Composed
from sandkeep.linux.overlay import Way

T = TypeVar("T")


class _WorkerEnded(Exception):
    """The worker died during a request, or before it received one. Callers get a `TransportError`."""


class Spawner(Protocol):
    """Runs a program in the namespaces where the files of sandboxes are accessible."""

    data_dir: str
    mode: Any
    way: Way | None
    """How overlays are mounted; if ``None``, the worker finds out itself."""

    async def start(self) -> None: ...
    def spawn(self, argv: list[str], fd: int, environment: dict[str, str]) -> None: ...


class Storage:
    """The client of one worker process, which it starts on first use and again after it died.

    Every operation can be repeated from its beginning after the worker died in the middle of it. So a request
    during which a worker died is sent once more, to a new worker: callers notice only if that one dies too.
    """

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Disconnect from the worker, which finishes its requests and ends."""
        if self._channel is not None:
            self._channel.drop(TransportError("closed"))

    # --- images ------------------------------------------------------------------------------------------

    async def rootfs(
        self,
        image: str,
        *,
        layer_id: str | None = None,
        project_id: str | None = None,
        progress: Progress | None = None,
    ) -> Composed:
        """Return an image with a layer's chain on top, ready to be mounted.

        With ``project_id`` the image must be one that this project may use; without, it is looked up by its
        id.
        """
        return await self._call(
            Composed, "rootfs", progress, image=image, layer_id=layer_id, project_id=project_id
        )

    async def get_image(
        self, image: str, *, project_id: str | None = None, progress: Progress | None = None
    ) -> Image:
        """Return an image by its name in a project, or by its id; build the ``host`` image if necessary."""
        return await self._call(Image, "get_image", progress, image=image, project_id=project_id)

    async def list_images(self, *, project_id: str | None = None) -> list[Image]:
        """Return the images that a project may use, or all of them."""
        return await self._call(list[Image], "list_images", project_id=project_id)

    async def remove_image(self, image: str, *, project_id: str | None = None) -> None:
        """Remove a name of an image and, with its last name, the image."""
        await self._send("remove_image", missing_ok=True, image=image, project_id=project_id)

    async def sweep_images(self) -> None:
        """Delete what interrupted pulls and imports left."""
        await self._send("sweep_images")

    async def pull_image(
        self,
        reference: str,
        *,
        platform: str | None = None,
        auth: tuple[str, str] | None = None,
        access: Access = OPERATOR,
        project_id: str | None = None,
        allowance: Allowance = UNLIMITED,
        progress: Progress | None = None,
    ) -> Image:
        """Fetch an image from a registry, for one project or for all projects."""
        return await self._call(
            Image,
            "pull_image",
            progress,
            reference=reference,
            platform=platform,
            auth=auth,
            access=access,
            project_id=project_id,
            allowance=allowance,
        )

    async def import_image(
        self, path: str, *, kind: ImportKind, name: str, reference: str | None = None
    ) -> Image:
        """Make an image from a directory or archive; ``reference`` selects one of several in an archive."""
        return await self._call(Image, "import_image", path=path, kind=kind, name=name, reference=reference)

    # --- making layers: by one rename at the end, under an id that the caller chose ------------------------

    async def publish_layer(
        self,
        session_id: str,
        *,
        layer_id: str,
        parent_id: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
    ) -> Layer:
        """Publish the files that an ended session wrote as a layer, referred to by ``holder``."""
        return await self._call(
            Layer,
            "publish_layer",
            session_id=session_id,
            layer_id=layer_id,
            parent_id=parent_id,
            image=image,
            host_key=host_key,
            holder=holder,
        )

    async def publish_slot(
        self,
        session_id: str,
        slot: str,
        *,
        layer_id: str,
        parent_id: str | None,
        image: str,
        holder: str | None = None,
    ) -> bool:
        """Publish one slot of an ended session as a layer, a drive's content; return whether it changed."""
        return await self._call(
            bool,
            "publish_slot",
            session_id=session_id,
            slot=slot,
            layer_id=layer_id,
            parent_id=parent_id,
            image=image,
            holder=holder,
        )

    async def copy_directory(self, layer_id: str) -> str:
        """Return the directory that a checkpoint for ``adopt_layer`` must be copied to."""
        return await self._call(str, "copy_directory", layer_id=layer_id)

    async def discard_copy(self, layer_id: str) -> None:
        """Delete a checkpoint copy that will not be adopted."""
        await self._send("discard_copy", layer_id=layer_id)

    async def adopt_layer(
        self,
        layer_id: str,
        *,
        parent_id: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
    ) -> Layer:
        """Publish the finished checkpoint copy at ``copy_directory`` as a layer, held by ``holder``."""
        return await self._call(
            Layer,
            "adopt_layer",
            layer_id=layer_id,
            parent_id=parent_id,
            image=image,
            host_key=host_key,
            holder=holder,
        )

    # --- layers ------------------------------------------------------------------------------------------

    async def list_layers(self) -> list[Layer]:
        """Return every layer that can be read."""
        return await self._call(list[Layer], "list_layers")

    async def drive_content(self, layer_id: str, *, sized: bool = False) -> DriveContent:
        """Return the lower directories of a drive, and with ``sized`` their bytes on disk."""
        return await self._call(DriveContent, "drive_content", layer_id=layer_id, sized=sized)

    async def has_directory(self, layer_id: str, path: str) -> bool:
        """Return whether a layer itself, not one below it, has a directory at ``path`` inside a sandbox."""
        return await self._call(bool, "has_directory", layer_id=layer_id, path=path)

    async def measure_layer(self, layer_id: str) -> int:
        """Return the bytes a layer takes on disk, and record them."""
        return await self._call(int, "measure_layer", layer_id=layer_id)

    async def sync_layer(self, layer_id: str) -> Layer:
        """Return a layer once it and every layer below it survive loss of power."""
        return await self._call(Layer, "sync_layer", layer_id=layer_id)

    async def fold_layers(self, tip_id: str, *, image: str | None, max_depth: int) -> int:
        """Fold a chain that is longer than ``max_depth``; return its length.

        ``image`` is the image below the chain; ``None`` for a drive's.
        """
        return await self._call(int, "fold_layers", tip_id=tip_id, image=image, max_depth=max_depth)

    async def collect_layers(
        self, *, parents: Mapping[str, str | None] | None = None, keep_ms: int = KEPT_MS
    ) -> Swept:
        """Delete layers without references, and host images that nothing uses.

        ``parents`` gives the parents of layers whose own record is damaged or missing. A layer that lost its
        references by accident is kept for ``keep_ms``.
        """
        return await self._call(Swept, "collect_layers", parents=parents, keep_ms=keep_ms)

    async def recover_layers(self) -> Recovered:
        """Finish or undo work that a crash interrupted."""
        return await self._call(Recovered, "recover_layers")

    async def examine_layers(self) -> Examined:
        """Return which layers exist and which of them are damaged; change nothing."""
        return await self._call(Examined, "examine_layers")

    async def repair_layer(
        self, layer_id: str, *, parent_id: str | None, image: str, host_key: str | None, created_ms: int
    ) -> bool:
        """Rewrite the record of a damaged layer; return whether that was possible."""
        return await self._call(
            bool,
            "repair_layer",
            layer_id=layer_id,
            parent_id=parent_id,
            image=image,
            host_key=host_key,
            created_ms=created_ms,
        )

    # --- references to layers ----------------------------------------------------------------------------

    async def hold_layer(self, layer_id: str, holder: str) -> None:
        """Add a reference to a layer: it is not deleted before ``holder`` releases it."""
        await self._send("hold_layer", layer_id=layer_id, holder=holder)

    async def release_layer(self, layer_id: str, holder: str) -> None:
        """Remove a reference, if there is one."""
        await self._send("release_layer", layer_id=layer_id, holder=holder)

    async def release_layers(self, holds: Sequence[tuple[str, str]]) -> None:
        """Remove several references: each a layer's id and a holder."""
        await self._send("release_layers", holds=holds)

    async def release_holder(self, holder: str) -> None:
        """Remove every reference of one holder."""
        await self._send("release_holder", holder=holder)

    async def layer_holders(self) -> dict[str, tuple[str, ...]]:
        """Return the holders of each layer, by the layer's id."""
        return await self._call(dict[str, tuple[str, ...]], "layer_holders")

    async def restore_holds(self, holds: Mapping[str, str]) -> list[str]:
        """Add missing references, by holder; return the ids of layers that lacked theirs."""
        return await self._call(list[str], "restore_holds", holds=holds)

    async def doubt_hold(self, layer_id: str, holder: str, *, keep_ms: int) -> Doubt:
        """End a reference whose holder is unknown, ``keep_ms`` after the first call for it."""
        return await self._call(Doubt, "doubt_hold", layer_id=layer_id, holder=holder, keep_ms=keep_ms)

    # --- what sessions leave -----------------------------------------------------------------------------

    async def discard_slot(self, session_id: str, slot: str) -> None:
        """Delete one slot of an ended session, so that it does not become part of a layer."""
        await self._send("discard_slot", session_id=session_id, slot=slot)

    async def discard_session(self, session_id: str) -> None:
        """Delete the files that an ended session wrote; its records and output stay."""
        await self._send("discard_session", session_id=session_id)

    async def remove_session(self, session_id: str) -> None:
        """Delete everything of an ended session, records and output included."""
        await self._send("remove_session", session_id=session_id)

    async def set_session_aside(self, session_id: str) -> int | None:
        """Return since when an unknown session is set aside, in milliseconds; ``None``: since this call."""
        return await self._call(int | None, "set_session_aside", session_id=session_id)  # type: ignore[arg-type]

    async def restore_specs(self, specs: Sequence[SpecOutline]) -> list[str]:
        """Rewrite damaged specifications of running sessions; return the ids of those sessions."""
        return await self._call(list[str], "restore_specs", specs=specs)

    # --- the worker process ------------------------------------------------------------------------------

    async def _call(
        self, result: type[T], operation: str, progress: Progress | None = None, **arguments: Any
    ) -> T:
        return msgspec.convert(await self._send(operation, progress=progress, **arguments), result)

    async def _send(
        self, operation: str, *, progress: Progress | None = None, missing_ok: bool = False, **arguments: Any
    ) -> Any:
        """Do one operation. With ``missing_ok``, ``NotFound`` means done if a first worker died during it."""
        plain = msgspec.to_builtins(arguments)
        try:
            return await self._request(operation, progress, plain)
        except _WorkerEnded:
            pass
        try:
            return await self._request(operation, progress, plain)
        except _WorkerEnded as error:
            raise TransportError(str(error), hint="the request can be repeated") from error
        except NotFound:
            if not missing_ok:
                raise
            return None

    async def _request(self, operation: str, progress: Progress | None, arguments: dict[str, Any]) -> Any:
        async with self._connecting:
            if self._channel is None or not self._channel.open:
                self._channel = await self._start()
            channel = self._channel
        return await channel.request({"op": operation, "arguments": arguments}, progress=progress)

    async def _start(self) -> Channel:
        await self._spawner.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        script = os.path.join(os.path.dirname(__file__), "start_worker.py")
        argv = [sys.executable, "-I", script, self._spawner.data_dir, self._spawner.mode]
        argv += [self._spawner.way] if self._spawner.way else []
        try:
            with theirs:
                self._spawner.spawn(argv, theirs.fileno(), dict(os.environ))
        except OSError as error:
            ours.close()
            raise _WorkerEnded(f"the worker process cannot be started: {error.strerror}") from error
        loop = asyncio.get_running_loop()
        try:
            _, channel = await loop.create_unix_connection(lambda: Channel(_ended), sock=ours)
        except BaseException:  # the caller was cancelled during the start
            ours.close()
            raise
        return channel


def _ended() -> _WorkerEnded:
    return _WorkerEnded("the worker process ended")
