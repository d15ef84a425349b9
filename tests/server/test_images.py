"""Images over the API: what a token may have the server fetch, and from where."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from sandkeep.server.auth import INFERRED_PROJECT
from tests.conftest import IS_ROOT
from tests.host.rootfs_runner import OciImage, digest, require_program, tar_of
from tests.host.test_images_registry import PASSWORD, USER, answer, blob_of, running_registry
from tests.host.test_images_registry import Registry as RealRegistry
from tests.internet import INSIDE, METADATA, OUTSIDE, Internet, http_server, internet
from tests.server.conftest import scoped
from tests.server.server_process import ServerProcess, running_server

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="needs real root: it makes network namespaces")
BASE = {"etc/passwd": b"root:x:0:0::/root:/bin/sh\n", "bin/sh": b"#!", "keep": b"k"}
SECRET = "canary-secret"


@dataclass
class Registry:
    """A registry on the other side that does what a test tells it."""

    address: str = ""
    saw: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths and Authorization headers."""
    image: OciImage = field(default_factory=lambda: OciImage().add(tar_of(BASE)))
    realm: str = ""
    redirect: str = ""
    fails: tuple[int, bytes] | None = None

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.saw.append((request.path, request.headers["Authorization"]))
        if self.fails is not None:
            answer(request, *self.fails)
        elif self.realm and request.headers["Authorization"] is None:
            answer(request, 401, WWW_Authenticate=f'Bearer realm="{self.realm}",service="s"')
        elif self.redirect:
            answer(request, 307, Location=self.redirect)
        else:
            answer(request, 200, blob_of(self.image, request.path) or b"")

    def reset(self) -> None:
        self.saw.clear()
        self.realm = self.redirect = ""
        self.fails = None


class Canary:
    """Listens, and counts who connects: a refusal must come before that."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._sock = socket.create_server((address, port))
        self.port: int = self._sock.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = json.dumps({"token": SECRET, "errors": [{"message": SECRET}]}).encode()
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            self.connections += 1
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()


@dataclass
class World:
    net: Internet
    server: ServerProcess
    registry: Registry
    closed: RealRegistry
    """The registry program, which wants a password; the operator has logged in to it."""
    canaries: dict[str, Canary]

    def pull(self, reference: str, *, token: str | None = None, **body: Any) -> dict[str, Any]:
        """The last record of the answer to a pull with a token, over TCP."""
        with self.net.inside(), self.server.client(token) as client:
            return last(client.post("/v1/images/pull", json={"reference": reference, **body}))

    def pull_locally(self, reference: str, **body: Any) -> dict[str, Any]:
        with self.server.local() as client:
            answered = client.post("/v1/images/pull", params=scoped(), json={"reference": reference, **body})
            return last(answered)

    def api(self, token: str | None = None) -> contextlib.AbstractContextManager[httpx.Client]:
        return self._api(token)

    @contextlib.contextmanager
    def _api(self, token: str | None) -> Iterator[httpx.Client]:
        with self.net.inside(), self.server.client(token) as client:
            yield client

    def names(self, token: str | None = None) -> set[str]:
        with self.api(token) as client:
            return {name for image in client.get("/v1/images").json()["images"] for name in image["names"]}

    def start(self, image: str, token: str | None = None) -> httpx.Response:
        """Create a sandbox that goes with its session."""
        with self.api(token) as client:
            body = {"name": f"t-{secrets.token_hex(4)}", "image": image, "persistent": False}
            return client.post("/v3/sandboxes", json={"projectId": INFERRED_PROJECT, **body})

    def push(self, image: OciImage) -> str:
        """Put an image into the closed registry; returns its reference."""
        name = f"t{secrets.token_hex(4)}"
        with self.net.outside():
            self.closed.push(name, "1", image)
        return f"{self.closed.address}/{name}:1"

    def connections(self) -> int:
        return sum(canary.connections for canary in self.canaries.values())


def runnable(**files: bytes) -> OciImage:
    """An image that sandboxes can start from: a static shell."""
    busybox = Path(require_program("busybox")).read_bytes()
    links: dict[str, Any] = {f"bin/{name}": ("sym", "busybox") for name in ("sh", "cat")}
    packed = tar_of({"bin/busybox": busybox, **links, "etc/passwd": BASE["etc/passwd"], **files}, mode=0o755)
    return OciImage().add(packed)


def last(answered: httpx.Response) -> dict[str, Any]:
    records = [json.loads(line) for line in answered.text.splitlines() if line.strip()]
    return dict(records[-1])


@pytest.fixture(scope="module")
def world(able: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    registry = Registry()
    area = tmp_path_factory.mktemp("registry")
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(internet())
        with net.outside():
            registry.address = stack.enter_context(http_server(registry.handle))
            closed = stack.enter_context(running_registry(str(area / "it"), password=True, host=OUTSIDE))
        with net.inside():
            canaries = {address: Canary(address) for address in ("127.0.0.1", INSIDE)}
        with net.outside():
            canaries[METADATA] = Canary(METADATA, 80)
        for canary in canaries.values():
            stack.callback(canary.close)
        settings = {
            "insecure_registries": [registry.address, closed.address],
            "max_image_bytes": 32 << 20,
            "max_image_entries": 2000,
        }
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (area / "config.json").write_text(json.dumps({"auths": {closed.address: {"auth": login}}}))
        with net.inside(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_CONFIG", str(area))  # the operator's
            server = stack.enter_context(running_server(settings=settings))
        yield World(net, server, registry, closed, canaries)


@pytest.fixture(autouse=True)
def fresh(world: World) -> None:
    world.registry.reset()


def test_a_token_pulls_from_a_public_registry(world: World) -> None:
    made = world.pull(f"{world.registry.address}/app", insecure=True)
    assert made["image"]["names"] == [f"{world.registry.address}/app:latest"]


def test_a_pull_with_a_token_connects_to_nothing_inside(world: World) -> None:
    loopback, own = world.canaries["127.0.0.1"].port, world.canaries[INSIDE].port
    said = set()
    for host in (
        f"127.0.0.1:{loopback}",
        "127.0.0.1:1",  # nobody listens: not to be told from the one above
        f"localhost:{loopback}",
        f"[::ffff:127.0.0.1]:{loopback}",
        f"{METADATA}:80",
        f"{INSIDE}:{own}",
        f"{INSIDE}:1",
        "no-such-name.invalid:5000",
    ):
        error = world.pull(f"{host}/app")["error"]
        name = host.rpartition(":")[0].strip("[]")
        said.add((error["code"], error["message"].replace(host, "X").replace(name, "X"), error["hint"]))
    assert len(said) == 1, said
    assert world.connections() == 0


@pytest.mark.parametrize("how", ["redirect", "realm"])
@pytest.mark.parametrize("address", ["127.0.0.1", METADATA, INSIDE])
def test_a_registry_does_not_lead_a_pull_inside(world: World, address: str, how: str) -> None:
    scheme = "http" if address == "127.0.0.1" else "https"  # as much as a registry can have asked for
    setattr(world.registry, how, f"{scheme}://{address}:{world.canaries[address].port}/latest/meta-data")
    error = world.pull(f"{world.registry.address}/app", insecure=True)["error"]
    assert f"{address} cannot be reached" in error["message"]
    assert world.connections() == 0
    assert not any(SECRET in str(authorization) for _, authorization in world.registry.saw)


def test_a_token_is_not_shown_what_a_registry_says(world: World) -> None:
    for status, meaning in ((403, "refuses"), (404, "no such image"), (418, "answers 418")):
        world.registry.fails = (status, json.dumps({"errors": [{"message": SECRET}]}).encode())
        error = world.pull(f"{world.registry.address}/app", insecure=True)["error"]
        assert meaning in error["message"] and SECRET not in json.dumps(error)


def test_insecure_is_for_listed_registries_and_the_local_user(world: World) -> None:
    with world.net.inside(), world.server.client() as client:
        body = {"reference": f"{OUTSIDE}:1/app", "insecure": True}
        refused = client.post("/v1/images/pull", json=body)
    assert refused.status_code == 403
    assert refused.json()["error"]["details"]["field"] == "insecure"
    assert "image" in world.pull_locally(f"{world.registry.address}/app", insecure=True)
    # What is listed is one registry, and no other place it leads to.
    world.registry.redirect = f"http://{OUTSIDE}:1/"
    error = world.pull(f"{world.registry.address}/app", insecure=True)["error"]
    assert "refused to go on over http" in error["message"]


def test_the_local_user_pulls_from_inside_and_hears_what_is_said(world: World) -> None:
    image = OciImage().add(tar_of(BASE))
    with world.net.inside(), http_server(
        lambda request: answer(request, 200, blob_of(image, request.path) or b""), "127.0.0.1"
    ) as address:  # fmt: skip
        assert "image" in world.pull_locally(f"{address}/app")
    world.registry.fails = (403, json.dumps({"errors": [{"message": SECRET}]}).encode())
    error = world.pull_locally(f"{world.registry.address}/app", insecure=True)["error"]
    assert SECRET in error["message"]


def test_private_sources_open_the_inside_but_not_the_server_itself(able: None) -> None:
    image = OciImage().add(tar_of(BASE))
    inside = http_server(
        lambda request: answer(request, 200, blob_of(image, request.path) or b""), "127.0.0.1"
    )
    settings = {"private_sources": True}
    with inside as address, running_server(settings=settings) as server, server.client() as client:
        pulled = last(client.post("/v1/images/pull", json={"reference": f"{address}/app"}))
        assert "image" in pulled
        own = server.url.removeprefix("http://")
        error = last(client.post("/v1/images/pull", json={"reference": f"{own}/app"}))["error"]
    assert "cannot be reached" in error["message"]


def test_callers_that_want_the_same_image_share_one_pull(able: None) -> None:
    image = OciImage().add(tar_of(BASE))
    gate = threading.Event()
    asked: list[str] = []

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        assert gate.wait(60)
        answer(request, 200, blob_of(image, request.path) or b"")

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(http_server(handle, "127.0.0.1"))
        server = stack.enter_context(running_server())
        client = stack.enter_context(server.local())
        body = {"reference": f"{address}/app"}
        pulls = [
            stack.enter_context(client.stream("POST", "/v1/images/pull", params=scoped(), json=body))
            for _ in range(6)  # more than run at the same time
        ]
        gate.set()
        ended = [list(pull.iter_lines())[-1] for pull in pulls]
    assert len({json.loads(line)["image"]["id"] for line in ended}) == 1
    assert len(asked) == 3, asked  # manifest, configuration, layer


def test_the_operators_login_is_for_the_local_user_only(world: World) -> None:
    with world.net.outside():
        world.closed.push("private", "1", OciImage().add(tar_of({**BASE, "secret": b"operator's"})))
    reference = f"{world.closed.address}/private:1"
    assert "401" in world.pull(reference, insecure=True)["error"]["message"]
    wrong = world.pull(reference, insecure=True, username=USER, password="wrong")
    assert "401" in wrong["error"]["message"]
    assert "image" in world.pull(reference, insecure=True, username=USER, password=PASSWORD)
    assert "image" in world.pull_locally(reference, insecure=True)


# --- whose they are ------------------------------------------------------------------------------------

LOGIN: dict[str, Any] = {"insecure": True, "username": USER, "password": PASSWORD}


@pytest.fixture(scope="module")
def other(world: World) -> str:
    """A token of another project."""
    return world.server.make_token(team="team_other", project="prj_other")


def test_an_image_is_the_projects_that_pulled_it(world: World, other: str) -> None:
    reference = world.push(runnable(**{"etc/mark": secrets.token_bytes(8)}))
    made = world.pull(reference, **LOGIN)["image"]
    assert reference in world.names() and not made["shared"]
    assert world.start(reference).status_code == world.start(made["id"]).status_code == 200
    assert reference not in world.names(other)
    for name in (reference, made["id"], made["id"][:20], made["id"].removeprefix("sha256:")[:12]):
        with world.api(other) as client:
            gone = client.delete(f"/v1/images/{quote(name, safe='')}")
        for refused in (world.start(name, other), gone):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), name
    assert "401" in world.pull(reference, token=other, insecure=True)["error"]["message"]
    assert reference in world.names()
    # With a password of its own it has the image under its own name, and the room is shared.
    assert world.pull(reference, token=other, **LOGIN)["image"]["id"] == made["id"]
    assert world.start(reference, other).status_code == 200


def test_knowing_what_an_image_is_made_of_is_not_enough_to_have_it(world: World, other: str) -> None:
    image = runnable(**{"etc/mark": secrets.token_bytes(8)})
    world.pull(world.push(image), **LOGIN)
    (layer,) = image.layers
    content = image.blobs[layer["digest"]]
    world.registry.image = image
    mine = f"{world.registry.address}/mine"
    # A registry of the other project's names that layer and does not have it.
    image.blobs[layer["digest"]] = bytes(layer["size"])
    assert "error" in world.pull(mine, token=other, insecure=True)
    assert world.start(digest(image.config_bytes()), other).status_code == 404
    image.blobs[layer["digest"]] = content
    assert "image" in world.pull(mine, token=other, insecure=True)
    assert world.start(mine, other).status_code == 200


def test_a_project_deletes_its_own_images_and_no_others(world: World, other: str) -> None:
    image = runnable(**{"etc/mark": secrets.token_bytes(8)})
    reference = world.push(image)
    for token in (None, other):
        world.pull(reference, token=token, **LOGIN)
    started = world.start(reference, other)
    assert started.status_code == 200
    path = f"/v1/images/{quote(reference, safe='')}"
    with world.api(other) as client:
        used = client.delete(path)
        assert (used.status_code, used.json()["error"]["kind"]) == (409, "wrong_state")
        assert used.json()["error"]["details"]["used_by"] == [started.json()["session"]["id"]]
    with world.api() as client:
        assert client.delete(path).status_code == 200
        assert client.delete(path).status_code == 404
    assert reference not in world.names() and reference in world.names(other)
    assert world.start(reference).status_code == 404
    with world.api(other) as client:
        client.delete(f"/v2/sandboxes/{started.json()['sandbox']['name']}")
        assert client.delete(path).status_code == 200
    value = image.diff_ids[0].removeprefix("sha256:")
    assert not (world.server.data / "images" / "layers" / value).exists()


def test_what_the_operator_shares_everybody_uses_and_nobody_else_deletes(world: World, other: str) -> None:
    reference = world.push(runnable(**{"etc/mark": secrets.token_bytes(8)}))
    assert world.pull_locally(reference, insecure=True, shared=True)["image"]["shared"]
    path = f"/v1/images/{quote(reference, safe='')}"
    for token in (None, other):
        assert reference in world.names(token)
        assert world.start(reference, token).status_code == 200
        with world.api(token) as client:
            assert client.delete(path).status_code == 403
            body = {"reference": reference, "shared": True, **LOGIN}
            assert client.post("/v1/images/pull", json=body).status_code == 403


# --- how much ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["bytes", "after the end", "entries", "directories above"])
def test_a_small_download_does_not_become_a_large_image(world: World, what: str) -> None:
    layer = tar_of(BASE)
    if what == "bytes":
        layer = tar_of({**BASE, "zeros": bytes(64 << 20)})
    elif what == "after the end":
        layer += bytes(64 << 20)
    elif what == "entries":
        layer = tar_of({**BASE, **{f"empty{number}": b"" for number in range(2000)}})
    else:
        layer = tar_of({**BASE, **{f"{number}" + "/d" * 300: None for number in range(8)}})
    world.registry.image = OciImage().add(layer)
    error = world.pull(f"{world.registry.address}/large", insecure=True)["error"]
    assert error["code"] == "limit_reached", error
    data = world.server.data / "images"
    value = world.registry.image.diff_ids[0].removeprefix("sha256:")
    assert not (data / "layers" / value).exists() and list((data / "build").iterdir()) == []
    assert not any(name.endswith("/large:latest") for name in world.names())


def test_an_image_announced_larger_than_allowed_is_not_fetched(world: World) -> None:
    world.registry.image = OciImage().add(tar_of({**BASE, "new": b"new"}))
    world.registry.image.layers[0]["size"] = 1 << 40
    error = world.pull(f"{world.registry.address}/large", insecure=True)["error"]
    assert error["code"] == "limit_reached"
    assert not any(world.registry.image.layers[0]["digest"] in path for path, _ in world.registry.saw)
