"""The process that does bulk disk work: images, layers, and what ended sessions leave.

It runs beside the zygote, in its namespaces, because rootless only a process in there has rights over the
files of sandboxes. Callers talk to it through ``Storage``; here is the other end: requests come in as frames,
each runs on a thread, answers and progress go back as they are ready.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Final, NoReturn

from sandkeep.errors import InternalError, InvalidRequest, SandkeepError, path_error
from sandkeep.host.images.store import ImageStore
from sandkeep.host.layers.store import LayerStore
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.rootfs import Flavour, Rootfs, Slot
from sandkeep.supervisor import protocol
from sandkeep.supervisor.copying import own_attributes

_THREADS: Final = 8
_DEEPEST: Final = 200
"""Layers a session is started on at most; folding is done before that, and ahead of time if all goes well."""
Report = Callable[[str, int, int], None]
"""Progress: what is being done, how much of it, of how much."""


class Worker:
    def __init__(self, data_dir: str, mode: Any) -> None:
        self._data_dir = data_dir
        self._images = ImageStore(data_dir, mode=mode)
        self._flavour: Flavour = "trusted" if mode == "root" else "user"
        self._layers = LayerStore(data_dir, flavour=self._flavour)

    # --- root filesystems --------------------------------------------------------------------------------

    def rootfs(self, report: Report, *, image: str, layer: str | None) -> dict[str, Any]:
        """An image with a layer's chain on top, ready to be mounted, and what to tell the user about it."""
        found = self._image(image, report)
        self._shorten(layer, found.rootfs())
        composed = self._layers.compose(found.rootfs(), layer)
        warnings = []
        if layer is not None:
            warning = self._images.warning_for(self._layers.get(layer).host_key)
            warnings = [warning] if warning else []
        return {"rootfs": composed.to_json(), "warnings": warnings}

    def _shorten(self, layer: str | None, rootfs: Rootfs) -> None:
        """Fold a chain that grew quicker than anybody came to fold it, before it cannot be mounted."""
        if layer is not None and self._layers.get(layer).depth > _DEEPEST:
            self._layers.compact(layer, rootfs=rootfs)

    def _image(self, name: str, report: Report) -> Any:
        return self._images.host(progress=report) if name == "host" else self._images.get(name)

    def get_image(self, report: Report, *, image: str) -> dict[str, Any]:
        return _plain(self._image(image, report))

    def list_images(self, report: Report) -> dict[str, Any]:
        return {"images": [_plain(image) for image in self._images.list()]}

    def remove_image(self, report: Report, *, image: str) -> dict[str, Any]:
        self._images.remove(image)
        return {}

    def pull_image(self, report: Report, *, reference: str, **options: Any) -> dict[str, Any]:
        """Fetch from a registry; options: platform, auth, insecure."""
        return _plain(self._images.pull(reference, progress=report, **options))

    def import_image(
        self, report: Report, *, kind: str, path: str, name: str, **options: Any
    ) -> dict[str, Any]:
        importers: dict[str, Callable[..., Any]] = {
            "directory": self._images.import_directory,
            "tar": self._images.import_tar,
            "oci-layout": self._images.import_oci_layout,
            "docker-archive": self._images.import_docker_archive,
        }
        if kind not in importers:
            raise InvalidRequest(f"kind is one of {', '.join(importers)}", field="kind")
        return _plain(importers[kind](path, name=name, **options))

    # --- layers ------------------------------------------------------------------------------------------

    def publish(self, report: Report, **arguments: Any) -> dict[str, Any]:
        return _plain(self._layers.publish(arguments.pop("session"), **arguments))

    def publish_slot(
        self, report: Report, *, session: str, slot: str, parent: str | None, **arguments: Any
    ) -> dict[str, Any]:
        """Make one slot of an ended session a layer of its own: how a drive's content is kept.

        The slot is first moved to a session directory of its own, so that the rest of the session can become
        a layer without it; from there everything is as for a session, repeatable at every step.
        """
        apart = f"{session}-{slot}"
        source = f"{self._data_dir}/sessions/{session}/fs/{slot}"
        target = f"{self._data_dir}/sessions/{apart}/fs"
        if os.path.isdir(source):
            if parent is not None and self._unchanged(source, parent):
                os.rmdir(source)
                return {"published": False}
            os.makedirs(target, mode=0o700, exist_ok=True)
            os.rename(source, f"{target}/root")
        layer = self._layers.publish(apart, parent=parent, **arguments)
        remove_tree(f"{self._data_dir}/sessions/{apart}")
        return {"published": True, "layer": _plain(layer)}

    def _unchanged(self, slot: str, parent: str) -> bool:
        """Whether a drive's new layer would show just what is below: nothing in it, the same attributes."""
        if os.listdir(slot):
            return False
        (below,) = self._layers.compose(self._drive(), parent).slots
        now, before = os.stat(slot), os.stat(below.lowers[0].path)
        same = (now.st_mode, now.st_uid, now.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
        return same and own_attributes(slot) == own_attributes(below.lowers[0].path)

    def discard_slot(self, report: Report, *, session: str, slot: str) -> dict[str, Any]:
        """Keep one slot of an ended session out of the layer the rest of it may become."""
        remove_tree(f"{self._data_dir}/sessions/{session}/fs/{slot}")
        return {}

    def directories(self, report: Report, *, layer: str) -> dict[str, Any]:
        """Where a drive's content is, topmost first."""
        drive = self._drive()
        self._shorten(layer, drive)
        (slot,) = self._layers.compose(drive, layer).slots
        return {"directories": [lower.path for lower in slot.lowers]}

    def _drive(self) -> Rootfs:
        """What a drive's layers stand on: nothing."""
        return Rootfs("drive", self._flavour, (Slot("root", "/", ()),))

    def copy_directory(self, report: Report, *, layer: str) -> dict[str, Any]:
        return {"directory": self._layers.copy_directory(layer)}

    def discard_copy(self, report: Report, *, layer: str) -> dict[str, Any]:
        self._layers.discard_copy(layer)
        return {}

    def adopt(self, report: Report, **arguments: Any) -> dict[str, Any]:
        return _plain(self._layers.adopt(**arguments))

    def list_layers(self, report: Report) -> dict[str, Any]:
        return {"layers": [_plain(layer) for layer in self._layers.list()]}

    def hold(self, report: Report, *, layer: str, holder: str) -> dict[str, Any]:
        self._layers.hold(layer, holder)
        return {}

    def release(self, report: Report, *, layer: str, holder: str) -> dict[str, Any]:
        self._layers.release(layer, holder)
        return {}

    def release_all(self, report: Report, *, holder: str) -> dict[str, Any]:
        self._layers.release_all(holder)
        return {}

    def holders(self, report: Report) -> dict[str, Any]:
        """Who refers to each layer."""
        return {"layers": {layer.id: list(self._layers.holders(layer.id)) for layer in self._layers.list()}}

    def collect(self, report: Report) -> dict[str, Any]:
        return {"deleted": list(self._layers.collect())}

    def measure(self, report: Report, *, layer: str) -> dict[str, Any]:
        return {"size_bytes": self._layers.measure(layer)}

    def sync(self, report: Report, *, layer: str) -> dict[str, Any]:
        return _plain(self._layers.sync(layer))

    def compact(self, report: Report, *, tip: str, image: str | None, max_depth: int) -> dict[str, Any]:
        """Fold a chain that has become long. ``image`` is what it stands on, if it is not a drive's."""
        rootfs = self._drive() if image is None else self._image(image, report).rootfs()
        return {"depth": self._layers.compact(tip, rootfs=rootfs, max_depth=max_depth).depth}

    def recover(self, report: Report) -> dict[str, Any]:
        return _plain(self._layers.recover())

    def discard(self, report: Report, *, session: str) -> dict[str, Any]:
        """Throw away what an ended session wrote; its records and output stay."""
        self._layers.discard(session)
        return {}

    def remove_session(self, report: Report, *, session: str) -> dict[str, Any]:
        """Everything an ended session left, records and output included."""
        self._layers.discard(session)
        remove_tree(f"{self._data_dir}/sessions/{session}")
        return {}


OPERATIONS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "image.get": Worker.get_image,
    "image.list": Worker.list_images,
    "image.remove": Worker.remove_image,
    "image.import": Worker.import_image,
    "image.pull": Worker.pull_image,
    "rootfs": Worker.rootfs,
    "layer.publish": Worker.publish,
    "layer.publish-slot": Worker.publish_slot,
    "layer.discard-slot": Worker.discard_slot,
    "layer.directories": Worker.directories,
    "layer.copy-directory": Worker.copy_directory,
    "layer.discard-copy": Worker.discard_copy,
    "layer.adopt": Worker.adopt,
    "layer.list": Worker.list_layers,
    "layer.hold": Worker.hold,
    "layer.release": Worker.release,
    "layer.release-all": Worker.release_all,
    "layer.holders": Worker.holders,
    "layer.collect": Worker.collect,
    "layer.measure": Worker.measure,
    "layer.sync": Worker.sync,
    "layer.compact": Worker.compact,
    "layer.recover": Worker.recover,
    "session.discard": Worker.discard,
    "session.remove": Worker.remove_session,
}


def _plain(value: Any) -> dict[str, Any]:
    body: dict[str, Any] = dataclasses.asdict(value)
    return body


def serve(sock: socket.socket, worker: Worker) -> NoReturn:
    """Answer requests until the caller is gone; what is under way then is finished first."""
    sending = Lock()
    decoder = protocol.FrameDecoder()

    def send(body: dict[str, Any]) -> None:
        try:
            with sending:
                sock.sendall(protocol.encode(body))
        except OSError:
            pass  # the caller is gone; the work itself still counts

    def handle(body: dict[str, Any]) -> None:
        request = body["id"]
        try:
            operation = OPERATIONS.get(body["op"])
            if operation is None:
                raise InvalidRequest(f"unknown operation {body['op']!r}", field="op")
            result = operation(
                worker,
                lambda what, done, total: send({"id": request, "progress": [what, done, total]}),
                **body.get("arguments", {}),
            )
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
        return b""  # the caller was killed before it had read all our answers


def main() -> NoReturn:
    os.umask(0o022)
    serve(socket.socket(fileno=3), Worker(sys.argv[1], sys.argv[2]))
