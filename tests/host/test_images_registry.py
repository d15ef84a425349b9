"""Pulling from a real registry program on loopback, through connections that break and servers that lie."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import ImageError, InvalidRequest, NotFound
from sandkeep.host.images import ImageStore
from sandkeep.host.images.oci import own_platform
from sandkeep.host.images.reference import parse_reference
from sandkeep.host.images.transport import stored_credentials
from tests.host import rootfs_runner
from tests.host.rootfs_runner import OciImage, tar_of

CHECKLIST = os.path.join(os.path.dirname(__file__), "rootfs_checklist.sh")
BASE = {"etc/passwd": b"root:x:0:0::/root:/bin/sh\n", "bin/sh": b"#!", "keep": b"k"}
USER, PASSWORD = "alice", "secret"
# bcrypt of PASSWORD, cost 4: the registry takes no other form.
HTPASSWD = f"{USER}:$2b$04$wF4iBhmNUrq03xVt6AdGre6MOSySHuZwm8FlPSkJwm3FmuIJxcQJy\n"


@dataclass(frozen=True)
class Registry:
    address: str
    storage: str
    headers: dict[str, str]

    def push(self, name: str, tag: str, image: OciImage) -> dict[str, Any]:
        """Push every blob and the manifest, the way the distribution API says."""
        descriptor = image.manifest()
        for digest, data in image.blobs.items():
            if digest != descriptor["digest"]:
                self._push_blob(name, digest, data)
        self.push_manifest(name, tag, image.blobs[descriptor["digest"]], descriptor["mediaType"])
        return {**descriptor, "platform": {"os": "linux", "architecture": image.architecture}}

    def push_manifest(self, name: str, tag: str, body: bytes, kind: str) -> None:
        self._request("PUT", f"/v2/{name}/manifests/{tag}", body, {"Content-Type": kind})

    def _push_blob(self, name: str, digest: str, data: bytes) -> None:
        location = self._request("POST", f"/v2/{name}/blobs/uploads/", b"", {})
        parts = urllib.parse.urlsplit(location)
        where = f"{parts.path}?{parts.query}&digest={digest}"
        self._request("PUT", where, data, {"Content-Type": "application/octet-stream"})

    def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> str:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request(method, path, body, {**self.headers, **headers})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status in (201, 202), (answer.status, text)
            return answer.headers["Location"]


@contextlib.contextmanager
def running_registry(directory: str, *, password: bool, host: str = "127.0.0.1") -> Iterator[Registry]:
    program = rootfs_runner.require_program("docker-registry")
    with socket.socket() as probe:
        probe.bind((host, 0))
        address = f"{host}:{probe.getsockname()[1]}"
    os.makedirs(directory)
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": f"{directory}/data"}},
        "http": {"addr": address},
    }
    headers = {}
    if password:
        Path(f"{directory}/htpasswd").write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "test", "path": f"{directory}/htpasswd"}}
        headers["Authorization"] = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    Path(f"{directory}/config.yml").write_text(json.dumps(config))  # JSON is YAML
    with open(f"{directory}/log", "wb") as log:
        server = subprocess.Popen([program, "serve", f"{directory}/config.yml"], stdout=log, stderr=log)
    try:
        _wait_for(address)
        yield Registry(address, f"{directory}/data", headers)
    finally:
        server.terminate()
        server.wait()


def _wait_for(address: str) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {address}")


@pytest.fixture(scope="module")
def area() -> Iterator[str]:
    rootfs_runner.require_root()
    directory = f"/dev/shm/sandkeep-registry-{uuid.uuid4().hex[:8]}"
    os.makedirs(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def registry(area: str) -> Iterator[Registry]:
    with running_registry(f"{area}/open", password=False) as running:
        yield running


@pytest.fixture(scope="module")
def closed_registry(area: str) -> Iterator[Registry]:
    with running_registry(f"{area}/closed", password=True) as running:
        yield running


@pytest.fixture
def store(area: str) -> Iterator[ImageStore]:
    directory = f"{area}/store-{uuid.uuid4().hex[:8]}"
    yield ImageStore(directory, mode="root")
    shutil.rmtree(directory)


def content(store: ImageStore, name: str, path: str) -> bytes:
    session = f"{store.data_dir}/session-{uuid.uuid4().hex[:6]}"
    return rootfs_runner.look(store.get(name).rootfs(), "root", session)[path].content


def unused_name() -> str:
    return f"test/{uuid.uuid4().hex[:8]}"


# --- pulling -------------------------------------------------------------------------------------------


def test_a_debian_is_pulled_and_holds_what_clients_rely_on(registry: Registry, store: ImageStore) -> None:
    image = OciImage(config={"Env": ["FROM=registry"]})
    image.add(Path(rootfs_runner.debian_rootfs()).read_bytes(), "zstd")
    image.add(tar_of({"etc/added": b"1", "usr/share/doc/.wh..wh..opq": b"", "etc/.wh.issue": b""}))
    registry.push("debian", "12", image)
    seen: dict[str, tuple[int, int]] = {}
    pulled = store.pull(
        f"{registry.address}/debian:12", progress=lambda d, done, all: seen.update({d: (done, all)})
    )
    assert seen == {layer["digest"]: (layer["size"], layer["size"]) for layer in image.layers}
    assert pulled.id == rootfs_runner.digest(image.config_bytes())
    assert pulled.names == (f"{registry.address}/debian:12",)
    assert pulled.defaults.env["FROM"] == "registry"
    argv = ["sh", "-c", Path(CHECKLIST).read_text(), "checklist", "python", "apt-get"]
    ran = rootfs_runner.run_in(pulled.rootfs(), "root", f"{store.data_dir}/s", argv)
    assert (ran.code, ran.out) == (0, ""), ran
    script = "cat /etc/added; ls /usr/share/doc | wc -l; test ! -e /etc/issue && echo gone"
    ran = rootfs_runner.run_in(pulled.rootfs(), "root", f"{store.data_dir}/s", ["sh", "-c", script])
    assert ran.out.split() == ["10", "gone"]
    assert os.listdir(f"{store.directory}/blobs") == []


def test_an_image_pushed_by_another_tool_is_pulled(
    registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    skopeo = rootfs_runner.require_program("skopeo")
    layout = rootfs_runner.write_layout(f"{tmp_path}/layout", {"x": OciImage().add(tar_of(BASE))})
    target = f"docker://{registry.address}/skopeo:v2s2"
    command = [skopeo, "copy", "--insecure-policy", "--dest-tls-verify=false", "--format", "v2s2"]
    subprocess.run([*command, f"oci:{layout}:x", target], check=True, capture_output=True)
    store.pull(f"{registry.address}/skopeo:v2s2")
    assert content(store, f"{registry.address}/skopeo:v2s2", "/keep") == b"k"


def test_the_manifest_for_the_platform_is_chosen(registry: Registry, store: ImageStore) -> None:
    name = unused_name()
    own = own_platform().split("/")[1]
    other = "riscv64" if own != "riscv64" else "s390x"
    entries = []
    for architecture in (other, own):
        image = OciImage(architecture=architecture).add(tar_of({**BASE, "arch": architecture.encode()}))
        entries.append(registry.push(name, architecture, image))
    kind = "application/vnd.oci.image.index.v1+json"
    index = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()
    registry.push_manifest(name, "latest", index, kind)
    store.pull(f"{registry.address}/{name}")
    assert content(store, f"{registry.address}/{name}", "/arch") == own.encode()
    store.pull(f"{registry.address}/{name}:latest", platform=f"linux/{other}")
    assert content(store, f"{registry.address}/{name}", "/arch") == other.encode()
    with pytest.raises(ImageError, match=other):
        store.pull(f"{registry.address}/{name}", platform="linux/mips")
    by_digest = store.pull(f"{registry.address}/{name}@{rootfs_runner.digest(index)}")
    assert by_digest.names[-1].endswith(rootfs_runner.digest(index))


def test_what_is_not_there_is_not_found(registry: Registry, store: ImageStore) -> None:
    with pytest.raises(NotFound):
        store.pull(f"{registry.address}/no/such:image")


def test_layers_already_here_are_not_fetched_again(registry: Registry, store: ImageStore) -> None:
    name, base = unused_name(), tar_of(BASE)
    registry.push(name, "1", OciImage().add(base))
    registry.push(name, "2", OciImage().add(base).add(tar_of({"two": b"2"})))
    store.pull(f"{registry.address}/{name}:1")
    asked: set[str] = set()
    store.pull(f"{registry.address}/{name}:2", progress=lambda digest, _done, _all: asked.add(digest))
    assert len(asked) == 1


def test_pulls_of_one_image_at_once_share_their_work(registry: Registry, store: ImageStore) -> None:
    image = OciImage()
    for number in range(6):
        image.add(tar_of({**BASE, f"f{number}": os.urandom(300_000)}))
    name = f"{registry.address}/{unused_name()}"
    registry.push(name.partition("/")[2], "latest", image)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = [*pool.map(lambda _: rootfs_runner.call(store.data_dir, "root", "pull", name), range(3))]
    assert len({(image.id, image.created_ms) for image in made}) == 1
    assert os.listdir(f"{store.directory}/blobs") == os.listdir(f"{store.directory}/build") == []


# --- who may -------------------------------------------------------------------------------------------


def test_a_password_is_asked_for_and_given(
    closed_registry: Registry, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_registry.push("private", "1", OciImage().add(tar_of(BASE)))
    name = f"{closed_registry.address}/private:1"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(ImageError, match="401"):
        store.pull(name)
    with pytest.raises(ImageError, match="401"):
        store.pull(name, auth=(USER, "wrong"))
    store.pull(name, auth=(USER, PASSWORD))
    store.remove(name)
    encoded = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {closed_registry.address: {"auth": encoded}}}))
    assert stored_credentials(closed_registry.address) == (USER, PASSWORD)
    assert stored_credentials("other.example") is None
    store.pull(name)


Handler = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def http_server(handle: Handler) -> Iterator[str]:
    """A small server of our own, for behaviour the registry program does not show."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handle(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def answer(
    request: http.server.BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def blob_of(image: OciImage, path: str) -> bytes | None:
    """What a registry holding only ``image`` answers for a path."""
    reference = urllib.parse.urlsplit(path).path.rpartition("/")[2]
    return image.blobs.get(image.manifest()["digest"] if reference == "latest" else reference)


def test_a_token_is_fetched_and_never_follows_a_redirect(store: ImageStore) -> None:
    image = OciImage().add(tar_of(BASE))
    storage_saw: list[str | None] = []
    tokens: list[tuple[str, str | None]] = []

    def storage(request: http.server.BaseHTTPRequestHandler) -> None:
        storage_saw.append(request.headers["Authorization"])
        answer(request, 200, blob_of(image, request.path) or b"")

    def service(request: http.server.BaseHTTPRequestHandler) -> None:
        tokens.append((request.path, request.headers["Authorization"]))
        answer(request, 200, b'{"token": "t0ken"}')

    with http_server(storage) as storage_at, http_server(service) as service_at:

        def front(request: http.server.BaseHTTPRequestHandler) -> None:
            if request.headers["Authorization"] != "Bearer t0ken":
                realm = f'Bearer realm="http://{service_at}/token",service="reg",scope="repository:app:pull"'
                answer(request, 401, WWW_Authenticate=realm)
            elif "/blobs/" in request.path:
                answer(request, 307, Location=f"http://{storage_at}{request.path}")
            else:
                answer(request, 200, blob_of(image, request.path) or b"")

        with http_server(front) as front_at:
            store.pull(f"{front_at}/app", auth=(USER, PASSWORD))
    assert storage_saw == [None, None]
    assert len(tokens) == 1
    path, authorization = tokens[0]
    assert urllib.parse.parse_qs(urllib.parse.urlsplit(path).query) == {
        "service": ["reg"],
        "scope": ["repository:app:pull"],
    }
    assert authorization is not None and authorization.startswith("Basic ")


# --- what goes wrong -----------------------------------------------------------------------------------


@contextlib.contextmanager
def cutting_proxy(address: str, limits: list[int]) -> Iterator[str]:
    """Relays TCP to ``address``; each connection whose answer exceeds the next limit is cut there."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def relay(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            client.settimeout(60)
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(65536)
                if not request or request[0] == 0x16:  # the attempt to speak TLS
                    return
            close = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
            server.sendall(close)
            limit = limits.pop(0) if b"/blobs/" in request and limits else 1 << 40
            while limit > 0 and (data := server.recv(min(65536, limit))):
                limit -= len(data)
                client.sendall(data)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=relay, args=(client,)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def big_image() -> OciImage:
    return OciImage().add(tar_of({**BASE, "big": os.urandom(3_000_000)}), "")


def test_a_cut_download_goes_on_where_it_stopped(registry: Registry, store: ImageStore) -> None:
    name, image = unused_name(), big_image()
    registry.push(name, "latest", image)
    done: list[int] = []
    # The first blob asked for is the configuration.
    with cutting_proxy(registry.address, [1 << 40, 1_000_000, 500_000, 700_000]) as through:
        store.pull(f"{through}/{name}", progress=lambda _digest, at, _all: done.append(at))
        assert done == sorted(done), "started again instead of going on"
        assert len(content(store, f"{through}/{name}", "/big")) == 0  # too large to be looked at, but there


def test_a_later_pull_goes_on_where_an_earlier_one_gave_up(registry: Registry, store: ImageStore) -> None:
    name, image = unused_name(), big_image()
    registry.push(name, "latest", image)
    with (
        cutting_proxy(registry.address, [1 << 40, 1_000_000, *[0] * 20]) as through,
        pytest.raises(ImageError),
    ):
        store.pull(f"{through}/{name}")
    (part,) = os.listdir(f"{store.directory}/blobs")
    kept = os.path.getsize(f"{store.directory}/blobs/{part}")
    assert kept > 900_000
    done: list[int] = []
    store.pull(f"{registry.address}/{name}", progress=lambda _digest, at, _all: done.append(at))
    assert min(done) > kept
    assert os.listdir(f"{store.directory}/blobs") == []


def test_a_wrong_beginning_left_behind_is_thrown_away(registry: Registry, store: ImageStore) -> None:
    name, image = unused_name(), big_image()
    registry.push(name, "latest", image)
    os.makedirs(f"{store.directory}/blobs")
    part = image.layers[0]["digest"].removeprefix("sha256:") + ".part"
    Path(f"{store.directory}/blobs/{part}").write_bytes(b"not the beginning" * 1000)
    store.pull(f"{registry.address}/{name}")


def test_a_blob_changed_on_the_server_is_refused(registry: Registry, store: ImageStore) -> None:
    name, image = unused_name(), big_image()
    registry.push(name, "latest", image)
    value = image.layers[0]["digest"].removeprefix("sha256:")
    stored = Path(f"{registry.storage}/docker/registry/v2/blobs/sha256/{value[:2]}/{value}/data")
    data = bytearray(stored.read_bytes())
    data[2_000_000] ^= 1
    stored.write_bytes(data)
    with pytest.raises(ImageError, match="does not match"):
        store.pull(f"{registry.address}/{name}")
    assert store.list() == []
    assert os.listdir(f"{store.directory}/layers") == []


@pytest.mark.parametrize("what", ["manifest", "config", "diff_id", "longer"])
def test_a_server_that_lies_is_not_believed(store: ImageStore, what: str) -> None:
    image = OciImage().add(tar_of(BASE))
    if what == "diff_id":
        image.diff_ids[0] = "sha256:" + "0" * 64
    descriptor = image.manifest()
    config = rootfs_runner.digest(image.config_bytes())

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        body = blob_of(image, request.path) or b""
        changed = {"manifest": "/manifests/", "config": config, "longer": image.layers[0]["digest"]}
        if changed.get(what, "nothing") in request.path:
            body += b" "
        answer(request, 200, body)

    with http_server(handle) as address, pytest.raises(ImageError):
        store.pull(f"{address}/app@{descriptor['digest']}")
    assert store.list() == []
    assert os.listdir(f"{store.directory}/layers") == []


def test_a_busy_server_is_asked_again(store: ImageStore) -> None:
    image = OciImage().add(tar_of(BASE))
    turned_away: list[str] = []

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        if request.path not in turned_away:
            turned_away.append(request.path)
            answer(request, 503)
        else:
            answer(request, 200, blob_of(image, request.path) or b"")

    with http_server(handle) as address:
        store.pull(f"{address}/app")
    assert len(turned_away) == 3


def test_a_redirect_away_from_loopback_over_plain_http_is_refused(store: ImageStore) -> None:
    away = http_server(lambda request: answer(request, 302, Location="http://192.0.2.1/x"))
    with away as address, pytest.raises(ImageError, match="refused"):
        store.pull(f"{address}/app")


def test_redirects_do_not_go_on_for_ever(store: ImageStore) -> None:
    circle = http_server(lambda request: answer(request, 302, Location=request.path))
    with circle as address, pytest.raises(ImageError, match="redirects"):
        store.pull(f"{address}/app")


# --- references ----------------------------------------------------------------------------------------

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "host", "repository", "version", "short"),
    [
        ("debian", "docker.io", "library/debian", "latest", "debian:latest"),
        ("debian:12", "docker.io", "library/debian", "12", "debian:12"),
        ("me/app", "docker.io", "me/app", "latest", "me/app:latest"),
        ("docker.io/library/debian", "docker.io", "library/debian", "latest", "debian:latest"),
        ("localhost/app", "localhost", "app", "latest", "localhost/app:latest"),
        ("localhost:5000/a/b:t", "localhost:5000", "a/b", "t", "localhost:5000/a/b:t"),
        ("[::1]:5000/app", "[::1]:5000", "app", "latest", "[::1]:5000/app:latest"),
        (f"reg.example/app@{DIGEST}", "reg.example", "app", DIGEST, f"reg.example/app@{DIGEST}"),
        (f"reg.example/app:t@{DIGEST}", "reg.example", "app", DIGEST, f"reg.example/app:t@{DIGEST}"),
    ],
)
def test_references_are_read_as_docker_does(
    text: str, host: str, repository: str, version: str, short: str
) -> None:
    reference = parse_reference(text)
    assert (reference.host, reference.repository, reference.version) == (host, repository, version)
    assert str(reference) == short


@pytest.mark.parametrize(
    "text",
    [
        "",
        "UPPER",
        "a:",
        "a:b:c",
        "a@sha256:12",
        "a/../b",
        "a b",
        "host:99/",
        "x@",
        "a?b",
        f"a@md5:{'a' * 32}",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(text)
