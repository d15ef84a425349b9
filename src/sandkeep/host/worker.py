"""The worker: the process that does bulk disk work on images, layers, and files of ended sessions.

It is a child of the zygote, in its namespaces, because rootless only a process in there has rights over the
files of sandboxes. `sandkeep.host.storage.Storage` is its client, and documents each operation. Requests
arrive as frames and each runs on a thread; responses and progress are sent as they are ready.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, NoReturn, cast, get_args

from sandkeep.errors import InternalError, InvalidRequest, LayerError, NotFound, SandkeepError, path_error
from sandkeep.host.images.allowance import UNLIMITED, Allowance
from sandkeep.host.images.image import Image, ImportKind
from sandkeep.host.images.registry import Progress
from sandkeep.host.images.store import ImageStore
from sandkeep.host.images.transport import OPERATOR, Access
from sandkeep.host.layers.marks import KEPT_MS, Marks
from sandkeep.host.layers.sessions import SpecOutline, restore_spec
from sandkeep.host.layers.store import LayerStore
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.layers.values import (
    Doubt,
    DriveContent,
    Examined,
    Layer,
    Recovered,
    Swept,
    check_name,
)
from sandkeep.host.rootfs import Composed, Flavour, Rootfs, Slot
from sandkeep.linux.overlay import Way
from sandkeep.shared import protocol
from sandkeep.shared.copying import own_attributes

_THREADS: Final = 8
_DEEPEST: Final = 200
"""The longest chain of layers that a session starts on. The engine folds chains long before."""


class Worker:
    """One public method per operation of `sandkeep.host.storage.Storage`, with the same parameters."""

    def __init__(self, data_dir: str, mode: Any, way: Way | None = None) -> None:
        """Open the stores. ``way`` is how overlays are mounted, by default the newest that works."""
        self._data_dir = data_dir
        self._images = ImageStore(data_dir, mode=mode, way=way)
        self._flavour: Flavour = "trusted" if mode == "root" else "user"
        self._layers = LayerStore(data_dir, flavour=self._flavour, way=way)

    # --- images ------------------------------------------------------------------------------------------

    def rootfs(
        self,
        image: str,
        *,
        layer_id: str | None = None,
        project_id: str | None = None,
        progress: Progress | None = None,
    ) -> Composed:
        base = self.get_image(image, project_id=project_id, progress=progress).rootfs()
        self._fold_too_long(layer_id, base)
        composed = self._layers.compose(base, layer_id)
        warning = None
        if layer_id is not None:
            warning = self._images.warning_for(self._layers.get(layer_id).host_key)
        return Composed(composed, () if warning is None else (warning,))

    def _fold_too_long(self, layer_id: str | None, rootfs: Rootfs) -> None:
        """Fold a chain that grew faster than the engine folded it, before it is too long to mount."""
        if layer_id is not None and self._layers.get(layer_id).depth > _DEEPEST:
            self._layers.fold_to_depth(layer_id, rootfs=rootfs)

    def get_image(
        self, image: str, *, project_id: str | None = None, progress: Progress | None = None
    ) -> Image:
        if image == "host":
            return self._images.host(progress=progress)
        return self._images.get(image, project=project_id)

    def list_images(self, *, project_id: str | None = None) -> list[Image]:
        return self._images.list(project=project_id)

    def remove_image(self, image: str, *, project_id: str | None = None) -> None:
        self._images.remove(image, project=project_id)

    def sweep_images(self) -> None:
        self._images.sweep()

    def pull_image(
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
        return self._images.pull(
            reference,
            platform=platform,
            auth=auth,
            access=access,
            project=project_id,
            allowance=allowance,
            progress=progress,
        )

    def import_image(self, path: str, *, kind: ImportKind, name: str, reference: str | None = None) -> Image:
        match kind:
            case "directory":
                return self._images.import_directory(path, name=name)
            case "tar":
                return self._images.import_tar(path, name=name)
            case "oci-layout":
                return self._images.import_oci_layout(path, name=name, reference=reference)
            case "docker-archive":
                return self._images.import_docker_archive(path, name=name, tag=reference)
        raise InvalidRequest(f"kind is one of {', '.join(get_args(ImportKind))}", field="kind")

    # --- making layers -----------------------------------------------------------------------------------

    def publish_layer(
        self,
        session_id: str,
        *,
        layer_id: str,
        parent_id: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
    ) -> Layer:
        return self._layers.publish(
            session_id,
            layer=layer_id,
            parent=parent_id,
            image=image,
            host_key=host_key,
            holder=holder,
            on_record=True,
        )

    def publish_slot(
        self,
        session_id: str,
        slot: str,
        *,
        layer_id: str,
        parent_id: str | None,
        image: str,
        holder: str | None = None,
    ) -> bool:
        """Move the slot to a session directory of its own first.

        The rest of the session can then become a layer without it. From there on the slot is handled like a
        session, and every step can be repeated.
        """
        apart = f"{session_id}-{slot}"
        source = f"{self._data_dir}/sessions/{session_id}/fs/{slot}"
        target = f"{self._data_dir}/sessions/{apart}/fs"
        if os.path.isdir(source):
            if parent_id is not None and self._unchanged(source, parent_id):
                os.rmdir(source)
                return False
            os.makedirs(target, mode=0o700, exist_ok=True)
            os.rename(source, f"{target}/root")
        try:
            self._layers.publish(
                apart, layer=layer_id, parent=parent_id, image=image, holder=holder, on_record=True
            )
        except NotFound:
            # An earlier attempt found the slot unchanged and removed it; or the session never had this slot.
            return False
        remove_tree(f"{self._data_dir}/sessions/{apart}")
        return True

    def _unchanged(self, slot: str, parent_id: str) -> bool:
        """Return whether a drive's new layer would change nothing: it is empty, with the same attributes."""
        if os.listdir(slot):
            return False
        try:
            (below,) = self._layers.compose(self._drive(), parent_id).slots
        except LayerError:
            return False  # a layer below is damaged, which must not prevent a session from ending
        now, before = os.stat(slot), os.stat(below.lowers[0].path)
        same = (now.st_mode, now.st_uid, now.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
        return same and own_attributes(slot) == own_attributes(below.lowers[0].path)

    def copy_directory(self, layer_id: str) -> str:
        return self._layers.copy_directory(layer_id)

    def discard_copy(self, layer_id: str) -> None:
        self._layers.discard_copy(layer_id)

    def adopt_layer(
        self,
        layer_id: str,
        *,
        parent_id: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
    ) -> Layer:
        return self._layers.adopt(
            layer=layer_id, parent=parent_id, image=image, host_key=host_key, holder=holder
        )

    # --- layers ------------------------------------------------------------------------------------------

    def list_layers(self) -> list[Layer]:
        return list(self._layers.list())

    def drive_content(self, layer_id: str, *, sized: bool = False) -> DriveContent:
        drive = self._drive()
        self._fold_too_long(layer_id, drive)
        (slot,) = self._layers.compose(drive, layer_id).slots
        size = sum(self._size(link) for link in self._layers.chain(layer_id)) if sized else None
        return DriveContent(tuple(lower.path for lower in slot.lowers), size)

    def _size(self, layer: Layer) -> int:
        return self._layers.measure(layer.id) if layer.size_bytes is None else layer.size_bytes

    def _drive(self) -> Rootfs:
        """Return the root filesystem below a drive's layers: an empty one."""
        return Rootfs("drive", self._flavour, (Slot("root", "/", ()),))

    def has_directory(self, layer_id: str, path: str) -> bool:
        directory = self._layers.get(layer_id).directory
        return os.path.isdir(f"{self._data_dir}/layers/{layer_id}/{directory}/root{path}")

    def measure_layer(self, layer_id: str) -> int:
        return self._layers.measure(layer_id)

    def sync_layer(self, layer_id: str) -> Layer:
        return self._layers.sync(layer_id)

    def fold_layers(self, tip_id: str, *, image: str | None, max_depth: int) -> int:
        rootfs = self._drive() if image is None else self.get_image(image).rootfs()
        return self._layers.fold_to_depth(tip_id, rootfs=rootfs, max_depth=max_depth).depth

    def collect_layers(
        self, *, parents: Mapping[str, str | None] | None = None, keep_ms: int = KEPT_MS
    ) -> Swept:
        swept = self._layers.sweep(parents=parents, keep_ms=keep_ms)
        self._images.collect()
        return swept

    def recover_layers(self) -> Recovered:
        return self._layers.recover()

    def examine_layers(self) -> Examined:
        return self._layers.examine()

    def repair_layer(
        self, layer_id: str, *, parent_id: str | None, image: str, host_key: str | None, created_ms: int
    ) -> bool:
        return self._layers.repair(
            layer_id, parent=parent_id, image=image, host_key=host_key, created_ms=created_ms
        )

    # --- references to layers ----------------------------------------------------------------------------

    def hold_layer(self, layer_id: str, holder: str) -> None:
        self._layers.hold(layer_id, holder)

    def release_layer(self, layer_id: str, holder: str) -> None:
        self._layers.release(layer_id, holder)

    def release_layers(self, holds: Sequence[tuple[str, str]]) -> None:
        for layer_id, holder in holds:
            self._layers.release(layer_id, holder)

    def release_holder(self, holder: str) -> None:
        self._layers.release_all(holder)

    def layer_holders(self) -> dict[str, tuple[str, ...]]:
        return self._layers.all_holders()

    def restore_holds(self, holds: Mapping[str, str]) -> list[str]:
        return self._layers.restore_holds(holds)

    def doubt_hold(self, layer_id: str, holder: str, *, keep_ms: int) -> Doubt:
        return self._layers.doubt(layer_id, holder, keep_ms=keep_ms)

    # --- what sessions leave -----------------------------------------------------------------------------

    def discard_slot(self, session_id: str, slot: str) -> None:
        remove_tree(f"{self._data_dir}/sessions/{session_id}/fs/{slot}")

    def discard_session(self, session_id: str) -> None:
        self._layers.discard(session_id)

    def remove_session(self, session_id: str) -> None:
        self._layers.discard(session_id)
        remove_tree(f"{self._data_dir}/sessions/{session_id}")

    def set_session_aside(self, session_id: str) -> int | None:
        marks = Marks(f"{self._data_dir}/sessions/{check_name(session_id, 'session')}")
        since_ms = marks.set_aside_since_ms()
        if since_ms is None:
            marks.set_aside()
        return since_ms

    def restore_specs(self, specs: Sequence[SpecOutline]) -> list[str]:
        restored = []
        for spec in specs:
            directory = f"{self._data_dir}/sessions/{check_name(spec.session_id, 'session')}"
            if os.path.isdir(directory) and restore_spec(directory, spec):
                restored.append(spec.session_id)
        return restored


OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    name: method for name, method in vars(Worker).items() if not name.startswith("_")
}
_REPORTING: Final = frozenset(
    name for name, method in OPERATIONS.items() if "progress" in inspect.signature(method).parameters
)
DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "access": Access.from_json,
        "allowance": lambda body: Allowance(**body),
        "specs": lambda bodies: [SpecOutline(**body) for body in bodies],
    }
)
"""How to decode an argument from JSON, by its name; the others are plain values."""


def _decoded(arguments: dict[str, Any]) -> dict[str, Any]:
    decoded = {name: DECODERS[name](value) for name, value in arguments.items() if name in DECODERS}
    return arguments | decoded


def _plain(value: Any) -> Any:
    """Return the JSON form of an operation's result."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def serve(sock: socket.socket, worker: Worker) -> NoReturn:
    """Serve requests until the client disconnects, then finish the pending ones and end."""
    sending = Lock()
    decoder = protocol.FrameDecoder()

    def send(body: dict[str, Any]) -> None:
        try:
            with sending:
                sock.sendall(protocol.encode(body))
        except OSError:
            pass  # the client is gone; the work is done all the same

    def report(request: int, what: str, done: int, total: int) -> None:
        send({"id": request, "progress": [what, done, total]})

    def handle(body: dict[str, Any]) -> None:
        request = body["id"]
        try:
            operation = OPERATIONS.get(body["op"])
            if operation is None:
                raise InvalidRequest(f"unknown operation {body['op']!r}", field="op")
            arguments = _decoded(body["arguments"])
            if body["op"] in _REPORTING:
                arguments["progress"] = partial(report, request)
            result = _plain(operation(worker, **arguments))
            send({"id": request, "ok": result})
        except SandkeepError as error:
            send({"id": request, "error": error.to_json()})
        except OSError as error:
            failure = path_error(error, body["op"], error.filename or "?")
            send({"id": request, "error": failure.to_json()})
        except Exception as error:
            failure_ = InternalError(f"{body.get('op')}: {type(error).__name__}: {error}")
            send({"id": request, "error": failure_.to_json()})

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="worker") as pool:
        while data := _receive(sock):
            for body, _ in decoder.feed(data):
                if body is not None:
                    pool.submit(handle, body)
    os._exit(0)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 20)
    except ConnectionResetError:
        return b""  # the client was killed before it had read all responses


def main() -> NoReturn:
    os.umask(0o022)
    # Several threads at once open all layers of a chain to mount them, hundreds at most.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    data_dir, mode, *way = sys.argv[1:]
    worker = Worker(data_dir, mode, cast(Way, way[0]) if way else None)
    serve(socket.socket(fileno=3), worker)
