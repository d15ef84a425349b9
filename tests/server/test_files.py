"""Files over HTTP: the official routes and our own."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import socket
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.server.conftest import Box
from tests.server.server_process import ServerProcess
from tests.server.test_commands import resident
from tests.server.test_sandboxes import refused


def archive(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def write(box: Box, files: dict[str, bytes], *, mode: int = 0o644, cwd: str = "/") -> httpx.Response:
    headers = {"content-type": "application/gzip", "x-cwd": cwd}
    body = gzip.compress(archive(files, mode))

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    return box.api.post(f"{box.path}/fs/write", content=chunks(), headers=headers)


def read(box: Box, path: str, **more: Any) -> httpx.Response:
    return box.api.post(f"{box.path}/fs/read", json={"path": path, **more})


def test_what_was_written_is_read_back(box: Box) -> None:
    content = bytes(range(256)) * 1000
    written = write(box, {"vercel/sandbox/a/b.bin": content, "vercel/sandbox/empty": b""}, mode=0o600)
    assert (written.status_code, written.json()) == (200, {})
    answer = read(box, "a/b.bin")
    assert answer.status_code == 200
    assert "application/octet-stream" in answer.headers["content-type"]
    assert answer.content == content
    assert read(box, "b.bin", cwd="a").content == content
    assert (read(box, "empty").status_code, read(box, "empty").content) == (200, b"")
    assert '"600 ' in box.run("stat", "-c", "%a %u", "a/b.bin").text


def test_a_missing_file_and_what_is_no_file_are_told_apart(box: Box) -> None:
    assert refused(read(box, "nothing")) == (404, "not_found")
    assert refused(read(box, "/vercel/sandbox")) == (400, "file_error")
    for directory in ("vercel/sandbox", ".", ""):
        assert refused(write(box, {directory: b"x"})) == (400, "file_error")
    assert write(box, {"../../etc/escape": b"x"}).status_code == 400
    damaged = box.api.post(f"{box.path}/fs/write", content=b"\x1f\x8b no archive")
    assert refused(damaged) == (400, "file_error")


def test_mkdir_makes_parents_unless_told_otherwise(box: Box) -> None:
    assert box.api.post(f"{box.path}/fs/mkdir", json={"path": "a/b/c"}).json() == {}
    refusal = box.api.post(f"{box.path}/fs/mkdir", json={"path": "x/y", "recursive": False})
    assert refused(refusal) == (404, "path_not_found")
    assert "No such file or directory" in refusal.json()["error"]["message"]


def test_our_own_routes_do_what_a_file_browser_needs(box: Box) -> None:
    def fs(operation: str, **body: Any) -> httpx.Response:
        return box.api.post(f"{box.own}/fs/{operation}", json=body)

    put = box.api.put(
        f"{box.own}/fs/content", params={"path": "d/f", "parents": "true"}, content=b"0123456789"
    )
    assert put.json() == {"bytesWritten": 10}
    part = box.api.get(f"{box.own}/fs/content", params={"path": "d/f", "offset": 3, "length": 4})
    assert part.content == b"3456"
    for name in ("offset", "length"):
        wrong = box.api.get(f"{box.own}/fs/content", params={"path": "d/f", name: -1})
        assert refused(wrong) == (400, "bad_request")
        assert wrong.json()["error"]["details"]["field"] == name
    box.api.put(f"{box.own}/fs/content", params={"path": "d/t"}, content=b"a\nb\xff\nc")
    shown = fs("lines", path="d/t", start=2, limit=1)
    assert shown.json() == {"text": "b\udcff\n", "start": 2, "lines": 1, "more": True, "cut": False}
    for name, value in (("start", 0), ("limit", -1), ("maxBytes", 1 << 30)):
        wrong = fs("lines", path="d/t", **{name: value})
        assert refused(wrong) == (400, "bad_request")
        assert wrong.json()["error"]["details"]["field"] == name
    assert fs("remove", path="d/t").status_code == 200
    box.api.put(f"{box.own}/fs/content", params={"path": "d/f", "append": "true"}, content=b"!")
    assert fs("stat", path="d/f").json()["file"]["size"] == 11
    assert fs("symlink", path="d/l", target="f").status_code == 200
    assert fs("readlink", path="d/l").json() == {"target": "f"}
    assert fs("realpath", path="d/l").json() == {"path": "/vercel/sandbox/d/f"}
    assert fs("realpath", path="d/no/such").json() == {"path": "/vercel/sandbox/d/no/such"}
    assert refused(fs("realpath", path="d/no/such", strict=True)) == (404, "not_found")
    over = fs("mkdir", path="d/f", parents=True)
    assert refused(over) == (400, "file_error") and over.json()["error"]["kind"] == "path_exists"
    assert fs("stat", path="d/l", follow=False).json()["file"]["kind"] == "symlink"
    assert fs("chmod", path="d/f", mode=0o700).status_code == 200
    assert fs("copy", path="d/f", target="d/g").json() == {"bytesWritten": 11}
    assert fs("rename", path="d/g", target="d/h").status_code == 200
    assert fs("mkdir", path="d/sub", mode=0o700).status_code == 200
    listed = {file["name"]: file["kind"] for file in fs("list", path="d").json()["files"]}
    assert listed == {"f": "file", "h": "file", "l": "symlink", "sub": "directory"}
    downloaded = fs("archive", paths=["d"])
    with tarfile.open(fileobj=io.BytesIO(downloaded.content)) as tar:
        assert {"d/f", "d/h", "d/l", "d/sub"} <= {name.removeprefix("./") for name in tar.getnames()}
    assert refused(fs("remove", path="d")) == (400, "file_error")
    assert fs("remove", path="d", recursive=True).status_code == 200
    assert refused(fs("stat", path="d")) == (404, "not_found")
    assert fs("remove", path="d", missing_ok=True, missingOk=True).status_code == 200
    assert fs("stat", path="/root/x").status_code in (400, 404)
    assert fs("stat", path="/root", sudo=True).status_code == 200


def test_a_tree_is_listed_unpacked_and_thinned_out_without_following_links(box: Box) -> None:
    def fs(operation: str, **body: object) -> httpx.Response:
        return box.api.post(f"{box.own}/fs/{operation}", json=body)

    def put(data: bytes, cwd: str) -> httpx.Response:
        return box.api.put(f"{box.own}/fs/tree/archive", params={"cwd": cwd}, content=data)

    assert put(archive({"a": b"1", "\udcff": b"2"}, 0o640), "tree").json() == {"entries": 2}
    fs("symlink", path="tree/out", target="/tmp")
    fs("mkdir", path="tree/d")
    lines = [json.loads(line) for line in fs("tree", path="tree", checksum=True).text.splitlines() if line]
    entries = {entry["path"]: entry for line in lines for entry in line["entries"]}
    assert lines[-1]["end"] and set(entries) == {"a", "\udcff", "out", "d"}
    assert entries["a"]["digest"] == hashlib.blake2b(b"1", digest_size=32).hexdigest()
    assert (entries["a"]["mode"], entries["out"]["target"]) == (0o640, "/tmp")
    assert "\udcff" not in fs("tree", path="tree", ignore=["?", "!a"]).text

    through = put(archive({"out/x": b"3"}), "tree")
    assert refused(through) == (400, "file_error") and refused(fs("stat", path="/tmp/x")) == (
        404,
        "not_found",
    )
    assert refused(fs("tree/remove", path="tree", names=["none", "out/x", "a"])) == (400, "file_error")
    assert fs("stat", path="tree/a").status_code == 200
    for name in ("../x", "/etc/passwd", "d/..", "", "."):
        wrong = fs("tree/remove", path="tree", names=[name])
        assert wrong.status_code == 400 and wrong.json()["error"]["details"]["field"].startswith("names"), (
            name
        )
    fs("mkdir", path="tree/d/kept")
    assert fs("tree/remove", path="tree", names=["out", "d"]).json() == {"kept": ["d"]}
    assert fs("stat", path="/tmp").status_code == 200, "the link is gone, not its target"
    fetched = fs("tree/archive", path="tree", names=["d", "gone"])
    with tarfile.open(fileobj=io.BytesIO(fetched.content)) as tar:
        assert tar.getnames() == ["d"]
    assert refused(fs("tree", path="none")) == (404, "not_found")
    assert refused(fs("tree", path="tree", ignore=["[a"])) == (400, "bad_request")


def test_a_large_file_goes_through_without_being_held(box: Box, server: ServerProcess) -> None:
    size, piece = 96 << 20, b"\x5a" * (1 << 20)
    before = resident(server.pid)
    highest = before

    def content() -> Iterator[bytes]:
        nonlocal highest
        for _ in range(size // len(piece)):
            highest = max(highest, resident(server.pid))
            yield piece

    where = {"path": "big"}
    assert (
        box.api.put(f"{box.own}/fs/content", params=where, content=content()).json()["bytesWritten"] == size
    )
    digest = hashlib.sha256()
    with box.api.stream("GET", f"{box.own}/fs/content", params=where) as answer:
        for data in answer.iter_bytes():
            highest = max(highest, resident(server.pid))
            digest.update(data)
    assert digest.digest() == hashlib.sha256(piece * (size // len(piece))).digest()
    assert highest - before < 32 << 20


def test_an_upload_that_breaks_off_leaves_no_file(box: Box, server: ServerProcess) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"PUT {box.own}/fs/content?path=half HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"{head}authorization: Bearer {server.token}\r\n\r\n".encode() + b"x" * 500_000)
        time.sleep(0.2)
    time.sleep(0.2)
    assert refused(read(box, "half")) == (404, "not_found")


def test_changes_are_told_as_they_happen(box: Box, server: ServerProcess) -> None:
    assert box.api.post(f"{box.own}/fs/mkdir", json={"path": "watched"}).status_code == 200
    with (
        server.client() as other,
        other.stream("POST", f"{box.own}/fs/watch", json={"path": "watched"}) as answer,
    ):
        assert answer.headers["content-type"] == "application/x-ndjson"
        # A heartbeat is an empty line; it lets the deadline below be seen.
        lines = (json.loads(line or '{"changes": []}') for line in answer.iter_lines())
        begun = next(lines)
        assert begun["changes"] == [] and begun["path"].endswith("/watched")
        box.start(
            "sh", "-c", "mkdir watched/new && echo x > watched/new/file && touch watched/a && rm watched/a"
        )
        seen: set[tuple[str, str]] = set()
        wanted = {("created", "new"), ("created", "new/file"), ("created", "a"), ("removed", "a")}
        deadline = time.monotonic() + 60
        while not wanted <= seen:
            assert time.monotonic() < deadline, seen
            changes = next(lines)["changes"]
            seen |= {(change["kind"], change["path"].rpartition("watched/")[2]) for change in changes}
    missing = box.api.post(f"{box.own}/fs/watch", json={"path": "no/such/place"})
    assert missing.status_code == 404


def test_what_hides_a_file_of_the_kernel_cannot_be_changed_by_a_token(box: Box) -> None:
    box.run("ln", "-s", "/proc/keys", "run.sh")
    before = os.stat("/dev/null")
    for path in ("/proc/keys", "run.sh"):
        answer = box.api.post(f"{box.own}/fs/chmod", json={"path": path, "mode": 0o666, "sudo": True})
        assert refused(answer) == (400, "file_error"), answer.text
    after = os.stat("/dev/null")
    assert (before.st_mode, before.st_ctime_ns) == (after.st_mode, after.st_ctime_ns)
    device = box.api.post(f"{box.own}/fs/chmod", json={"path": "/dev/null", "mode": 0o600, "sudo": True})
    assert refused(device)[0] == 400, device.text
