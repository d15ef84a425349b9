"""Images from directories, archives, OCI layouts and docker archives, and the layer that adapts them."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from sandkeep.errors import ImageError, InvalidRequest, NotFound, WrongState
from sandkeep.host.images import Image, ImageStore
from sandkeep.host.images.tree import Mode
from tests.host import rootfs_runner
from tests.host.rootfs_runner import OciImage, tar_of, write_layout

MODES: tuple[Mode, ...] = get_args(Mode)
CHECKLIST = os.path.join(os.path.dirname(__file__), "rootfs_checklist.sh")
PASSWD = b"root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/:/bin/false\n"
BASE = {"etc/passwd": PASSWD, "etc/group": b"root:x:0:\n", "bin/sh": b"#!", "old/file": b"old", "keep": b"k"}


@dataclass(frozen=True)
class Store:
    mode: Mode
    directory: str

    @property
    def data(self) -> str:
        return f"{self.directory}/data"

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return rootfs_runner.call(self.data, self.mode, method, *args, **kwargs)

    def look(self, image: Image) -> dict[str, rootfs_runner.Entry]:
        return rootfs_runner.look(image.rootfs(), self.mode, f"{self.directory}/{uuid.uuid4().hex}")

    def checklist(self, image: Image, *programs: str) -> None:
        with open(CHECKLIST) as script:
            argv = ["sh", "-c", script.read(), "checklist", *programs]
        ran = rootfs_runner.run_in(image.rootfs(), self.mode, f"{self.directory}/{uuid.uuid4().hex}", argv)
        assert (ran.code, ran.out) == (0, ""), ran

    def layers(self) -> list[str]:
        return sorted(os.listdir(f"{self.data}/images/layers"))


def _store(mode: Mode) -> Iterator[Store]:
    rootfs_runner.require_root()
    directory = rootfs_runner.own_directory(f"/dev/shm/sandkeep-import-{mode}-{uuid.uuid4().hex[:8]}", mode)
    try:
        yield Store(mode, directory)
    finally:
        shutil.rmtree(directory)


@pytest.fixture(params=MODES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    yield from _store(request.param)


@pytest.fixture
def root_store() -> Iterator[Store]:
    yield from _store("root")


@pytest.fixture
def readable(tmp_path: Path) -> Path:
    """A directory the worker can read in every mode."""
    return Path(rootfs_runner.own_directory(f"{tmp_path}/material", "root"))


def layout(path: Path, **images: OciImage) -> str:
    return write_layout(str(path / f"layout-{uuid.uuid4().hex[:6]}"), images)


# --- ways in -------------------------------------------------------------------------------------------


def test_a_debian_holds_what_clients_rely_on(store: Store, readable: Path) -> None:
    source = f"{readable}/debian.tar"
    shutil.copy(rootfs_runner.debian_rootfs(), source)
    image = store("import_tar", source, name="debian:test")
    assert image.warnings == ()
    assert image.defaults.user == "sandbox"
    store.checklist(image, "python", "python3", "apt-get", "dpkg")
    assert store("get", "debian:test") == image
    assert store("import_tar", source, name="again").names == ("debian:test", "again")


@pytest.mark.parametrize("pack", [gzip.compress, rootfs_runner.zstd, bytes])
def test_archives_of_each_compression_give_the_same_image(
    root_store: Store, readable: Path, pack: Any
) -> None:
    (readable / "a.tar").write_bytes(pack(tar_of(BASE)))
    image = root_store("import_tar", str(readable / "a.tar"), name="a")
    assert image.id == rootfs_runner.digest(tar_of(BASE))
    assert root_store.look(image)["/keep"].content == b"k"


def test_a_directory_is_copied_with_owners_links_and_attributes(store: Store, readable: Path) -> None:
    root = readable / "rootfs"
    for name, content in BASE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.link(root / "keep", root / "hard")
    os.symlink("/old/file", root / "sym")
    os.chown(root / "old/file", 33, 34)
    os.setxattr(root / "keep", "user.note", b"n")
    if store.mode != "root":
        owner = (
            f"{rootfs_runner.ORDINARY_ID}:{rootfs_runner.ORDINARY_ID}"  # the one who imports it; inside, root
        )
        subprocess.run(["chown", "-R", owner, str(root)], check=True)
    image = store("import_directory", str(root), name="dir")
    seen = store.look(image)
    assert seen["/sym"].content == b"/old/file"
    assert seen["/hard"].content == b"k"
    assert (seen["/old/file"].uid, seen["/old/file"].gid) == ((33, 34) if store.mode == "root" else (0, 0))
    assert image.kind == "directory"


def test_a_directory_that_cannot_be_read_whole_is_refused(readable: Path) -> None:
    for store in _store("single"):
        (readable / "rootfs").mkdir()
        (readable / "rootfs/secret").write_text("s")
        (readable / "rootfs/secret").chmod(0o600)
        with pytest.raises(ImageError, match="secret"):
            store("import_directory", str(readable / "rootfs"), name="dir")
        assert store("list") == []


def test_layers_stack_with_whiteouts_and_opaque_directories(store: Store, readable: Path) -> None:
    image = OciImage().add(tar_of(BASE))
    image.add(tar_of({".wh.keep": b"", "old/.wh..wh..opq": b"", "old/new": b"new"}), "zstd")
    image.add(tar_of({"etc/extra": b"3"}), "")
    made = store("import_oci_layout", layout(readable, v1=image), name="stacked")
    seen = store.look(made)
    assert "/keep" not in seen
    assert "/old/file" not in seen
    assert (seen["/old/new"].content, seen["/etc/extra"].content) == (b"new", b"3")
    assert made.id == rootfs_runner.digest(image.config_bytes())
    assert len(made.layers) == 3
    assert made.slots[0].lowers[0].path.endswith("/top")


def test_a_layout_with_several_images_needs_a_reference(root_store: Store, readable: Path) -> None:
    one, two = OciImage().add(tar_of(BASE)), OciImage().add(tar_of({**BASE, "which": b"two"}))
    path = layout(readable, one=one, two=two)
    with pytest.raises(ImageError, match="2 images"):
        root_store("import_oci_layout", path, name="x")
    with pytest.raises(NotFound):
        root_store("import_oci_layout", path, name="x", reference="three")
    image = root_store("import_oci_layout", path, name="x", reference="two")
    assert root_store.look(image)["/which"].content == b"two"
    with pytest.raises(ImageError, match="not an OCI image layout"):
        root_store("import_oci_layout", str(readable), name="x")


@pytest.mark.parametrize("which", ["layer", "config", "manifest"])
def test_a_layout_whose_content_was_changed_is_refused(root_store: Store, readable: Path, which: str) -> None:
    image = OciImage().add(tar_of(BASE), "")
    path = layout(readable, one=image)
    digests = {
        "layer": image.layers[0]["digest"],
        "config": rootfs_runner.digest(image.config_bytes()),
        "manifest": image.manifest()["digest"],
    }
    blob = f"{path}/blobs/sha256/{digests[which].removeprefix('sha256:')}"
    data = bytearray(Path(blob).read_bytes())
    data[data.index(b"old" if which == "layer" else b":") + 3] ^= 1
    Path(blob).write_bytes(data)
    with pytest.raises(ImageError):
        root_store("import_oci_layout", path, name="x")
    assert root_store("list") == []
    assert root_store.layers() == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_docker_archive_is_imported(store: Store, readable: Path, packed: bool) -> None:
    base, change = tar_of(BASE), tar_of({".wh.keep": b"", "new": b"n"})
    image = OciImage(config={"User": "daemon", "Env": ["MODE=prod"]}).add(base, "").add(change, "")
    entries: dict[str, Any] = {"config.json": image.config_bytes(), "aaa/layer.tar": base, "bbb": None}
    entries |= {"bbb/layer.tar": ("sym", "../ccc.tar"), "ccc.tar": change}
    listed = [{"Config": "config.json", "RepoTags": ["a:1"], "Layers": ["aaa/layer.tar", "bbb/layer.tar"]}]
    entries["manifest.json"] = json.dumps(listed).encode()
    archive = tar_of(entries)
    (readable / "saved.tar").write_bytes(gzip.compress(archive) if packed else archive)
    made = store("import_docker_archive", str(readable / "saved.tar"), name="saved", tag="a:1")
    seen = store.look(made)
    assert "/keep" not in seen
    assert seen["/new"].content == b"n"
    assert made.defaults.env["MODE"] == "prod"
    assert made.defaults.user == ("sandbox" if store.mode == "single" else "daemon")
    with pytest.raises(NotFound):
        store("import_docker_archive", str(readable / "saved.tar"), name="saved", tag="b")


def test_an_archive_written_by_another_tool_is_imported(root_store: Store, readable: Path) -> None:
    skopeo = rootfs_runner.require_program("skopeo")
    path = layout(readable, one=OciImage().add(tar_of(BASE)).add(tar_of({"b": b"b"})))
    target = f"{readable}/saved.tar"
    command = [skopeo, "copy", "--insecure-policy", f"oci:{path}:one", f"docker-archive:{target}:x:y"]
    subprocess.run(command, check=True, capture_output=True)
    image = root_store("import_docker_archive", target, name="saved", tag="x:y")
    assert root_store.look(image)["/b"].content == b"b"


# --- names, sharing, removal ---------------------------------------------------------------------------


def test_a_name_moves_to_the_image_that_gets_it_last(root_store: Store, readable: Path) -> None:
    path = layout(readable, one=OciImage().add(tar_of(BASE)), two=OciImage().add(tar_of({"x": b""})))
    one = root_store("import_oci_layout", path, name="app", reference="one")
    two = root_store("import_oci_layout", path, name="app", reference="two")
    assert root_store("get", "app").id == two.id
    assert root_store("get", one.id).names == ()
    assert root_store("get", one.id[7:19]).id == one.id
    assert [image.id for image in root_store("list")] == [one.id, two.id]


@pytest.mark.parametrize("name", ["host", "host@x", "sha256:x", "", "a b"])
def test_names_that_mean_something_else_are_refused(root_store: Store, readable: Path, name: str) -> None:
    (readable / "a.tar").write_bytes(tar_of(BASE))
    with pytest.raises(InvalidRequest):
        root_store("import_tar", str(readable / "a.tar"), name=name)


def test_shared_layers_go_with_the_last_image_that_uses_them(root_store: Store, readable: Path) -> None:
    base = tar_of(BASE)
    one, two = OciImage().add(base).add(tar_of({"1": b""})), OciImage().add(base).add(tar_of({"2": b""}))
    path = layout(readable, one=one, two=two)
    root_store("import_oci_layout", path, name="one", reference="one")
    made = root_store("import_oci_layout", path, name="two", reference="two")
    assert len(root_store.layers()) == 3
    root_store("remove", "one")
    assert root_store.layers() == sorted(layer.removeprefix("sha256:") for layer in made.layers)
    assert root_store.look(made)["/2"]
    root_store("remove", "two")
    assert root_store.layers() == []
    assert os.listdir(f"{root_store.data}/images/records") == []
    with pytest.raises(NotFound):
        root_store("remove", "two")


def test_an_image_a_session_uses_is_not_removed(root_store: Store, readable: Path) -> None:
    (readable / "a.tar").write_bytes(tar_of(BASE))
    image = root_store("import_tar", str(readable / "a.tar"), name="a")
    session = f"{root_store.data}/sessions/ses_1"
    os.makedirs(session)
    Path(f"{session}/spec.json").write_text(json.dumps({"image": image.id}))
    with pytest.raises(WrongState, match="ses_1"):
        root_store("remove", "a")
    shutil.rmtree(session)
    root_store("remove", "a")


def test_an_image_is_removed_by_the_beginning_of_its_id(root_store: Store, readable: Path) -> None:
    (readable / "a.tar").write_bytes(tar_of(BASE))
    image = root_store("import_tar", str(readable / "a.tar"), name="a")
    root_store("import_tar", str(readable / "a.tar"), name="b")
    root_store("remove", image.id.removeprefix("sha256:")[:12])
    assert root_store("list") == []
    assert root_store.layers() == []


def test_an_image_named_again_while_its_removal_waits_stays(root_store: Store, readable: Path) -> None:
    (readable / "a.tar").write_bytes(tar_of(BASE))
    store = ImageStore(root_store.data, mode="root")
    image = store.import_tar(str(readable / "a.tar"), name="a")
    store.import_tar(str(readable / "a.tar"), name="b")
    store._records.remove(image, "a")  # found before there was the other name
    assert store.get("b").names == ("b",)
    with pytest.raises(NotFound):
        store._records.remove(image, "a")
    assert store.get("b").id == image.id


def test_an_image_of_deeply_nested_directories_can_be_removed(root_store: Store, readable: Path) -> None:
    (readable / "a.tar").write_bytes(tar_of({**BASE, "d/" * 1800 + "x": b""}))
    root_store("import_tar", str(readable / "a.tar"), name="a")
    root_store("remove", "a")
    assert root_store.layers() == os.listdir(f"{root_store.data}/images/build") == []


def test_work_that_ends_while_others_start_disturbs_nobody(
    root_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(root_store.data, mode="root")
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*listed(path), "layer-moved-away"])
    with store._records.building("layer") as work:
        assert os.path.isdir(work)


def test_an_account_file_that_is_a_directory_is_hidden(root_store: Store, readable: Path) -> None:
    files = {name: content for name, content in BASE.items() if name != "etc/passwd"}
    (readable / "a.tar").write_bytes(tar_of({**files, "etc/passwd/x": b""}))
    image = root_store("import_tar", str(readable / "a.tar"), name="a")
    assert b"sandbox:x:" in root_store.look(image)["/etc/passwd"].content


def test_a_refused_archive_leaves_nothing(root_store: Store, readable: Path) -> None:
    (readable / "bad.tar").write_bytes(tar_of({"a": b"", "../b": b""}))
    with pytest.raises(ImageError):
        root_store("import_tar", str(readable / "bad.tar"), name="bad")
    assert root_store("list") == []
    assert root_store.layers() == os.listdir(f"{root_store.data}/images/build") == []
    with pytest.raises(InvalidRequest):
        root_store("import_tar", "/no/such/file", name="bad")


# --- adapting ------------------------------------------------------------------------------------------


def adapted(
    store: Store, readable: Path, files: dict[str, Any], **config: Any
) -> tuple[Image, dict[str, rootfs_runner.Entry]]:
    path = layout(readable, one=OciImage(config=config).add(tar_of({**BASE, **files})))
    image = store("import_oci_layout", path, name="adapted")
    return image, store.look(image)


def test_a_user_is_added_where_the_image_has_only_root(root_store: Store, readable: Path) -> None:
    image, seen = adapted(root_store, readable, {})
    assert b"sandbox:x:1000:1000:" in seen["/etc/passwd"].content
    assert b"daemon:x:1:1:" in seen["/etc/passwd"].content
    for path in ("/workspace", "/home/sandbox", "/vercel/sandbox"):
        assert (seen[path].uid, seen[path].gid) == (1000, 1000)
    assert stat.S_IMODE(seen["/tmp"].mode) == 0o1777
    assert seen["/etc/hostname"].content == b"sandbox\n"
    assert any("no sudo" in warning for warning in image.warnings)


@pytest.mark.parametrize(
    ("user", "rows", "expected"),
    [
        ("", b"ubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n", "ubuntu"),
        ("0", b"ubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n", "ubuntu"),
        ("root", b"", "sandbox"),
        ("node", b"node:x:1500:1500::/home/node:/bin/sh\n", "node"),
        ("1500:1500", b"node:x:1500:1500::/home/node:/bin/sh\n", "node"),
        ("nosuch", b"", "sandbox"),
        ("2000:3000", b"", "sandbox"),
    ],
)
def test_the_default_user_is_the_images_own_when_it_has_one(
    root_store: Store, readable: Path, user: str, rows: bytes, expected: str
) -> None:
    image, seen = adapted(root_store, readable, {"etc/passwd": PASSWD + rows}, User=user)
    assert image.defaults.user == expected
    row = next(
        line for line in seen["/etc/passwd"].content.decode().splitlines() if line.startswith(expected)
    )
    uid, gid, home = int(row.split(":")[2]), int(row.split(":")[3]), row.split(":")[5]
    for path in ("/workspace", "/vercel/sandbox"):
        assert (seen[path].uid, seen[path].gid) == (uid, gid)
    assert user != "2000:3000" or (uid, gid) == (2000, 3000)
    assert image.defaults.env["HOME"] == home
    assert seen[home].uid == uid


def test_the_images_environment_and_path_are_kept(root_store: Store, readable: Path) -> None:
    image, _ = adapted(root_store, readable, {}, Env=["PATH=/opt/bin:/bin", "LANG=de_DE.UTF-8", "A=b=c"])
    assert image.defaults.env["PATH"] == "/home/sandbox/.local/bin:/opt/bin:/bin:/usr/local/bin"
    assert (image.defaults.env["LANG"], image.defaults.env["A"]) == ("de_DE.UTF-8", "b=c")


ROOT_AND_NODE = PASSWD + b"node:x:1500:1500::/home/node:/bin/sh\n"


@pytest.mark.parametrize(
    ("config", "cwd", "home", "warned"),
    [
        ({"WorkingDir": "/srv/app"}, "/srv/app", None, ""),
        ({"WorkingDir": "/made/anew", "User": "node"}, "/made/anew", None, ""),
        ({"WorkingDir": "relative/./x/.."}, "/relative", None, ""),
        ({"WorkingDir": "/link/below"}, "/link/below", None, ""),
        ({"WorkingDir": "/usr/local"}, "/usr/local", None, ""),
        ({"WorkingDir": "/"}, None, None, ""),
        ({"WorkingDir": ""}, None, None, ""),
        ({"WorkingDir": "/keep"}, None, None, "it is not a directory"),
        ({"WorkingDir": "/keep/below"}, None, None, "/keep is not a directory"),
        ({"WorkingDir": "/run/app"}, None, None, "every session has its own there"),
        ({"WorkingDir": "/root"}, None, None, "may not enter it"),
        ({"WorkingDir": "/root/app"}, None, None, "may not enter /root"),
        ({"WorkingDir": "/line\nbreak"}, None, None, "its name cannot be used"),
        ({"Env": ["HOME=/srv/home"], "WorkingDir": "/srv/app"}, "/srv/app", "/srv/home", ""),
        ({"Env": ["HOME=/root"]}, None, None, "HOME '/root' is not used"),
    ],
)
def test_home_and_working_directory_are_what_the_images_author_chose(
    root_store: Store,
    readable: Path,
    config: dict[str, Any],
    cwd: str | None,
    home: str | None,
    warned: str,
) -> None:
    files: dict[str, Any] = {
        "etc/passwd": ROOT_AND_NODE,
        "srv/app/file": b"root's",
        "usr/local/x": b"",
        "link": ("sym", "srv/real"),
    }
    made = OciImage(config=config).add(tar_of({**BASE, **files}))
    if "Env" in config:
        made.add(_private_root())  # in the others it is made for them
    image = root_store("import_oci_layout", layout(readable, one=made), name="chosen")
    seen = root_store.look(image)
    defaults = image.defaults
    assert (defaults.cwd, defaults.own_cwd, defaults.home) == (cwd or "/workspace", cwd is not None, home)
    assert image.config == config
    complaints = [warning for warning in image.warnings if "is not used" in warning]
    assert len(complaints) == (1 if warned else 0) and all(warned in warning for warning in complaints)
    user = 1500 if defaults.user == "node" else 1000
    assert defaults.env["HOME"] == (home or ("/home/node" if user == 1500 else "/home/sandbox"))
    for path in filter(None, (cwd, home)):
        real = path.replace("/link", "/srv/real")
        expected = (0, 0) if path == "/usr/local" else (user, user)
        assert stat.S_ISDIR(seen[real].mode) and (seen[real].uid, seen[real].gid) == expected
    assert seen["/srv/app/file"].uid == 0 and stat.S_IMODE(seen["/root"].mode) == 0o700


def _private_root() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("root")
        info.type, info.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(info)
    return out.getvalue()


def test_a_real_sudo_is_kept_and_given_a_rule(root_store: Store, readable: Path) -> None:
    subprocess.run(["install", "-D", "-m", "4755", "/dev/null", f"{readable}/s/usr/bin/sudo"], check=True)
    packed = subprocess.run(
        ["tar", "-C", f"{readable}/s", "-c", "usr"], check=True, capture_output=True
    ).stdout
    image = OciImage().add(tar_of({**BASE, "etc/sudoers": b"#\n"})).add(packed)
    made = root_store("import_oci_layout", layout(readable, one=image), name="s")
    seen = root_store.look(made)
    assert b"sandbox ALL=(ALL:ALL) NOPASSWD: ALL" in seen["/etc/sudoers.d/sandkeep"].content
    assert stat.S_IMODE(seen["/etc/sudoers.d/sandkeep"].mode) == 0o440
    assert b"includedir /etc/sudoers.d" in seen["/etc/sudoers"].content
    assert seen["/usr/bin/sudo"].content == b""


def test_files_are_put_where_the_images_links_lead(root_store: Store, readable: Path) -> None:
    files: dict[str, Any] = {
        "usr/bin": ("sym", "../prog"),
        "prog/setpriv": b"\x7fELF",
        "prog/python3": b"\x7fELF",
    }
    image = OciImage()
    image.add(tar_of({**BASE, **files}))
    subprocess.run(["install", "-D", "-m", "755", "/bin/true", f"{readable}/s/prog/setpriv"], check=True)
    shutil.copy("/bin/true", f"{readable}/s/prog/python3")
    shutil.copytree(f"{readable}/s/prog", f"{readable}/s/bin")
    os.rename(f"{readable}/s/bin/setpriv", f"{readable}/s/bin/sh")
    packed = subprocess.run(["tar", "-C", f"{readable}/s", "-c", "."], check=True, capture_output=True).stdout
    made = root_store("import_oci_layout", layout(readable, one=image.add(packed)), name="l")
    seen = root_store.look(made)
    assert seen["/usr/bin"].content == b"../prog"
    assert seen["/prog/sudo"].content.startswith(b"#!/bin/sh")
    assert stat.S_IMODE(seen["/usr/libexec/sandkeep/as"].mode) == 0o4750
    assert seen["/prog/python"].content == b"python3"


def test_names_that_are_links_become_files_and_the_image_stays_as_it_was(
    root_store: Store, readable: Path
) -> None:
    image, seen = adapted(root_store, readable, {"etc/resolv.conf": ("sym", "../run/nowhere")})
    assert seen["/etc/resolv.conf"].content.startswith(b"nameserver ")
    below = f"{root_store.data}/images/layers/{image.layers[0].removeprefix('sha256:')}/fs"
    assert os.readlink(f"{below}/etc/resolv.conf") == "../run/nowhere"
    assert Path(f"{below}/etc/passwd").read_bytes() == PASSWD
