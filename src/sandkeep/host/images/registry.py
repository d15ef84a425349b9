"""Fetch an image's documents and layers from a registry: verified, several at a time, resumable.

A layer is downloaded to ``<digest>.part``; an interrupted download is continued from where it stopped, in
this call or in a later one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import BinaryIO, cast

from sandkeep.errors import ImageError
from sandkeep.fetch import NETWORK_ERRORS
from sandkeep.host.images.oci import (
    INDEXES,
    MANIFESTS,
    Blob,
    Manifest,
    choose,
    is_index,
    parse_json,
    parse_manifest,
    verified,
)
from sandkeep.host.images.reference import Reference
from sandkeep.host.images.streams import CHUNK
from sandkeep.host.images.transport import ATTEMPTS, Access, RegistryTransport

PARALLEL = 4
_MOST_JSON = 8 << 20
_ACCEPT = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}

Progress = Callable[[str, int, int], None]
"""Called with the item in progress, the bytes done, and the total (0 when unknown)."""


class Registry:
    """Fetches from a registry; a context manager. After ``seconds`` all connections are closed."""

    def __init__(
        self,
        reference: Reference,
        *,
        auth: tuple[str, str] | None,
        access: Access,
        seconds: float | None = None,
    ) -> None:
        self._transport = RegistryTransport(reference, auth=auth, access=access, seconds=seconds)
        self._reference = reference

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def manifest(self, platform: str) -> Manifest:
        body = self._document(self._reference.version, self._reference.digest)
        if is_index(body):
            chosen = choose(body, platform)
            body = self._document(chosen.digest, chosen.digest)
        return parse_manifest(body)

    def config(self, blob: Blob) -> bytes:
        with self._transport.get(f"blobs/{blob.digest}", {}) as response:
            return verified(_read_document(response), blob.digest)

    def layers(
        self,
        wanted: Sequence[tuple[Blob, str]],
        directory: str,
        *,
        has: Callable[[str], bool],
        progress: Progress | None,
    ) -> Generator[tuple[BinaryIO, str]]:
        """Download layers, given with the digest of their content, and yield each as an open file.

        ``has`` returns whether another process has stored a layer in the meantime. A file is removed when the
        caller asks for the next one. Closing the generator early stops the other downloads; their partial
        files are kept.
        """
        os.makedirs(directory, mode=0o700, exist_ok=True)
        stop = threading.Event()
        report = _serialised(progress)
        with concurrent.futures.ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool:
            running = {
                pool.submit(self._download, blob, directory, report, stop, partial(has, diff_id)): (
                    blob,
                    diff_id,
                )
                for blob, diff_id in wanted
            }
            try:
                # In order of completion: waiting for one while holding another's lock could deadlock two
                # pulls.
                for future in concurrent.futures.as_completed(running):
                    blob, diff_id = running[future]
                    file = future.result()
                    if file is not None:
                        yield file, diff_id
                        os.unlink(_part(directory, blob))  # still locked, so no other process uses it
                        file.close()
            finally:
                stop.set()
                for future in running:
                    if not future.cancel():
                        future.add_done_callback(_close_result)

    def _document(self, version: str, digest: str | None) -> dict[str, object]:
        with self._transport.get(f"manifests/{version}", _ACCEPT) as response:
            data = _read_document(response)
        return parse_json(verified(data, digest) if digest else data, "manifest")

    def _download(
        self, blob: Blob, directory: str, report: Progress, stop: threading.Event, has: Callable[[], bool]
    ) -> BinaryIO | None:
        """Return the finished download, locked until it is closed; ``None`` if the layer is not needed."""
        file = _open_locked(_part(directory, blob), stop)
        try:
            if has():
                os.unlink(_part(directory, blob))  # another process has stored it; this file is a new one
                file.close()
                return None
            _Download(self._transport, blob, file.fileno(), report, stop).run()
            report(blob.digest, blob.size, blob.size)
            file.seek(0)
            return file
        except BaseException:
            file.close()
            raise


class _Download:
    """Downloads one layer into one open file, which may already hold its beginning."""

    def __init__(
        self, transport: RegistryTransport, blob: Blob, fd: int, report: Progress, stop: threading.Event
    ) -> None:
        self._transport = transport
        self._blob = blob
        self._fd = fd
        self._report = report
        self._stop = stop
        self._hash = hashlib.sha256()
        self._done = 0

    def run(self) -> None:
        self._take_up()
        resumed = self._done > 0
        failures = 0
        while self._done < self._blob.size:
            before = self._done
            try:
                self._continue()
            except NETWORK_ERRORS as error:
                failures = 1 if self._done > before else failures + 1
                if failures >= ATTEMPTS:
                    raise ImageError(f"download of {self._blob.digest} broke off") from error
                time.sleep(0.1 * failures)
        if "sha256:" + self._hash.hexdigest() != self._blob.digest:
            self._restart()
            if not resumed:
                raise ImageError(
                    f"the registry sent content that does not match {self._blob.digest}",
                    digest=self._blob.digest,
                )
            # The partial file of an earlier call may have been wrong.
            self.run()

    def _take_up(self) -> None:
        """Hash the bytes that are already in the file."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        if os.fstat(self._fd).st_size > self._blob.size:
            self._restart()
        while data := os.read(self._fd, CHUNK):
            self._hash.update(data)
            self._done += len(data)

    def _restart(self) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self._done = 0

    def _continue(self) -> None:
        headers = {"Range": f"bytes={self._done}-"} if self._done else {}
        with self._transport.get(f"blobs/{self._blob.digest}", headers) as response:
            if self._done and not self._continues(response):
                self._restart()
                if response.status != 200:
                    return
            while data := response.read1(CHUNK):
                if self._stop.is_set():
                    raise ImageError("download stopped")
                self._done += len(data)
                if self._done > self._blob.size:
                    raise ImageError(f"the registry sends more than the {self._blob.size} bytes promised")
                self._hash.update(data)
                _write(self._fd, data)
                self._report(self._blob.digest, self._done, self._blob.size)
            if self._done < self._blob.size:
                raise http.client.IncompleteRead(b"", self._blob.size - self._done)

    def _continues(self, response: http.client.HTTPResponse) -> bool:
        start = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
        return response.status == 206 and start == str(self._done)


def _read_document(response: http.client.HTTPResponse) -> bytes:
    data = response.read(_MOST_JSON + 1)
    if response.status != 200 or len(data) > _MOST_JSON:
        raise ImageError("the registry's answer is not a document of sensible size")
    return data


def _part(directory: str, blob: Blob) -> str:
    return f"{directory}/{blob.digest.removeprefix('sha256:')}.part"


def remove_other_parts(directory: str, wanted: Sequence[Blob]) -> None:
    """Remove partial downloads that no process uses, except those that are needed now."""
    kept = {os.path.basename(_part(directory, blob)) for blob in wanted}
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if name in kept:
            continue
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),
            open(f"{directory}/{name}", "rb") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(f"{directory}/{name}")


def _open_locked(path: str, stop: threading.Event) -> BinaryIO:
    """Open and lock a download's file: another process may fetch the same layer, and remove it when done."""
    while not stop.is_set():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = os.fdopen(fd, "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return cast(BinaryIO, file)
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
        time.sleep(0.05)
    raise ImageError("download stopped")


def _close_result(future: concurrent.futures.Future[BinaryIO | None]) -> None:
    if not future.cancelled() and future.exception() is None:
        file = future.result()
        if file is not None:
            file.close()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _serialised(progress: Progress | None) -> Progress:
    lock = threading.Lock()

    def report(what: str, done: int, total: int) -> None:
        if progress:
            with lock:
                progress(what, done, total)

    return report
