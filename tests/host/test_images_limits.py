"""How much a pull may take of the machine, and what is left when it takes more."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import pytest

from sandkeep.errors import LimitReached, NoSpace
from sandkeep.host.images import ImageStore
from sandkeep.host.images.allowance import Allowance
from tests.host import rootfs_runner
from tests.host.rootfs_runner import OciImage, tar_of
from tests.host.test_images_registry import BASE, answer, blob_of, http_server


@pytest.fixture
def store() -> Iterator[ImageStore]:
    rootfs_runner.require_root()
    directory = f"/dev/shm/sandkeep-limits-{uuid.uuid4().hex[:8]}"
    yield ImageStore(directory, mode="root")
    shutil.rmtree(directory)


@pytest.fixture
def images() -> Iterator[tuple[str, list[OciImage]]]:
    """A registry of several images, each under its number."""
    made = [OciImage().add(tar_of({**BASE, "number": bytes([n])})) for n in range(3)]

    def handle(request: BaseHTTPRequestHandler) -> None:
        image = made[int(request.path.split("/")[2])]
        answer(request, 200, blob_of(image, request.path) or b"")

    with http_server(handle) as address:
        yield address, made


def test_a_project_has_so_many_images(store: ImageStore, images: tuple[str, list[OciImage]]) -> None:
    address, made = images
    allowance = Allowance(images=2)
    for number in (0, 1, 1):
        store.pull(f"{address}/{number}", project="one", allowance=allowance)
    with pytest.raises(LimitReached) as caught:
        store.pull(f"{address}/2", project="one", allowance=allowance)
    assert caught.value.details["limit"] == "images"
    value = made[2].diff_ids[0].removeprefix("sha256:")
    assert value not in os.listdir(f"{store.directory}/layers")
    store.pull(f"{address}/2", project="two", allowance=allowance)
    store.remove(f"{address}/0", project="one")
    store.pull(f"{address}/2", project="one", allowance=allowance)


def test_a_projects_images_have_so_many_bytes(store: ImageStore, images: tuple[str, list[OciImage]]) -> None:
    address, _ = images
    first = store.pull(f"{address}/0", project="one")
    with pytest.raises(LimitReached) as caught:
        store.pull(f"{address}/1", project="one", allowance=Allowance(project_bytes=first.size + 1))
    assert caught.value.details["limit"] == "images_bytes"


def test_pulls_leave_some_of_the_disk(store: ImageStore, images: tuple[str, list[OciImage]]) -> None:
    with pytest.raises(NoSpace):
        store.pull(f"{images[0]}/0", project="one", allowance=Allowance(free_percent=100))
    assert os.listdir(f"{store.directory}/layers") == []


@pytest.mark.parametrize("where", ["headers", "document", "layer"])
def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(store: ImageStore, where: str) -> None:
    image = OciImage().add(tar_of(BASE))
    over = threading.Event()

    def handle(request: BaseHTTPRequestHandler) -> None:
        slow = {"headers": "/v2/", "document": "/manifests/", "layer": image.layers[0]["digest"]}[where]
        if slow not in request.path:
            answer(request, 200, blob_of(image, request.path) or b"")
            return
        start = b"HTTP/1.1 200 OK\r\n"
        if where != "headers":
            start += b"Content-Length: %d\r\n\r\n" % image.layers[0]["size"]
        request.wfile.write(start)
        try:
            while not over.wait(0.1):
                request.wfile.write(b"x")
        except OSError:
            pass  # cut off, which is the point

    try:
        with http_server(handle) as address, pytest.raises(LimitReached) as caught:
            store.pull(f"{address}/app", project="one", allowance=Allowance(seconds=1))
    finally:
        over.set()
    assert caught.value.details["limit"] == "pull_seconds"


def test_begun_downloads_of_a_project_do_not_pile_up(
    store: ImageStore, images: tuple[str, list[OciImage]]
) -> None:
    directory = f"{store.directory}/blobs/one"
    os.makedirs(directory)
    for name in ("a", "b"):
        with open(f"{directory}/{name * 64}.part", "wb") as part:
            part.write(bytes(1000))
    store.pull(f"{images[0]}/0", project="one")
    assert os.listdir(directory) == []


def test_a_tls_handshake_that_never_ends_is_cut_with_the_pull(store: ImageStore) -> None:
    """A registry that sends a byte of it now and then keeps every single read within its own time limit."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.recv(1000)
            client.sendall(b"\x16\x03\x03\x40\x00")
            while not over.wait(0.1):
                client.sendall(b"\x02")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            with pytest.raises(LimitReached) as caught:
                store.pull(f"127.0.0.1:{listener.getsockname()[1]}/app", allowance=Allowance(seconds=1))
        finally:
            over.set()
            thread.join()
    assert caught.value.details["limit"] == "pull_seconds"
