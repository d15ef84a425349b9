"""``sandkeep images``: the images that sandboxes start from, of the project and of all projects."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli.app import App
from sandkeep.cli.batch import remove_each
from sandkeep.cli.framework import Group, argument, command, option
from sandkeep.cli.output import ago, size

if TYPE_CHECKING:
    from sandkeep.sync import Image, Pulled

images = Group(
    "images",
    "Manage the images that sandboxes start from. 'host', the system of the server's machine, always exists.",
    aliases={"list": "ls", "delete": "rm"},
)

_KINDS = ("directory", "tar", "oci-layout", "docker-archive")


@command("ls")
def ls(app: App) -> None:
    """List images, oldest first."""
    found = app.client.images.list()
    if app.json:
        app.out.json(found)
    elif found:
        rows = [
            (
                ", ".join(image.names) or "-",
                image.kind,
                size(image.size_bytes),
                "all projects" if image.shared else "this project",
                ago(image.created_at),
                image.id,
            )
            for image in found
        ]
        app.out.table(("NAME", "KIND", "SIZE", "OF", "CREATED", "ID"), rows)
        if len(found) > 1:
            app.note(f"\n{len(found)} images, {size(sum(image.size_bytes for image in found))}")
    else:
        app.note("no images yet besides 'host'; 'sandkeep images pull' pulls one")


@command(
    "pull",
    examples=[("and then", "sandkeep run --image debian:12 -- cat /etc/os-release")],
)
@argument("reference", metavar="REFERENCE", help="Such as debian:12 or registry.example.org/name:tag.")
@option("--platform", metavar="OS/ARCH", help="Such as linux/arm64 [default: the server's own]")
@option(
    "--username", metavar="NAME", help="User at the registry; the password is read from SANDKEEP_PASSWORD."
)
@option(
    "--insecure",
    is_flag=True,
    help="Allow plain HTTP and untrusted certificates; with a token only where the operator lists it.",
)
@option("--shared", is_flag=True, help="Pull it for all projects; for the local user of the server only.")
def pull(
    app: App, reference: str, platform: str | None, username: str | None, insecure: bool, shared: bool
) -> None:
    """Pull an image from a registry for the project. Layers that exist are not fetched again."""
    password = os.environ.get("SANDKEEP_PASSWORD") if username else None
    if username and not password:
        raise click.UsageError("--username needs the password in SANDKEEP_PASSWORD")
    parts: dict[str, tuple[int, int]] = {}
    with app.bar(f"Pulling {reference}") as bar:

        def progress(at: Pulled) -> None:
            parts[at.part] = (at.done, at.total)
            bar.update(sum(done for done, _ in parts.values()), sum(total for _, total in parts.values()))

        made = app.client.images.pull(
            reference,
            platform=platform,
            username=username,
            password=password,
            insecure=insecure,
            shared=shared,
            progress=progress,
        )
    _show(app, made)


@command(
    "import",
    examples=[
        ("an archive of docker save", "sandkeep images import app.tar --name app"),
        ("a directory made by debootstrap", "sandkeep images import ./rootfs --name base"),
    ],
)
@argument("path", metavar="PATH", help="A directory or archive on this machine.")
@option("--name", required=True, metavar="NAME", help="Name of the image.")
@option("--kind", type=click.Choice(_KINDS), help="Kind of the source [default: detected]")
@option("--reference", metavar="NAME", help="Which image, if a layout or archive holds several.")
def import_(app: App, path: str, name: str, kind: Any, reference: str | None) -> None:
    """Import an image for all projects: a root filesystem, an OCI layout, or an archive of 'docker save'."""
    if not os.path.exists(path):
        raise click.UsageError(f"{path} does not exist")
    with app.busy(f"Importing {path}"):
        made = app.client.images.import_(
            os.path.abspath(path), name, kind=kind or _kind(path), reference=reference
        )
    _show(app, made)


def _kind(path: str) -> Any:
    """Detect the kind of a source."""
    if os.path.isdir(path):
        return "oci-layout" if os.path.exists(os.path.join(path, "oci-layout")) else "directory"
    try:
        with tarfile.open(path) as archive:
            # docker save puts its manifest anywhere in the archive; a root filesystem has none at its top.
            for entry in archive:
                if entry.name == "manifest.json":
                    return "docker-archive"
    except (tarfile.TarError, EOFError):
        pass  # perhaps zstd, which the server can read
    return "tar"


@command("rm")
@argument("name", nargs=-1, required=True, metavar="NAME...", help="Names or ids of images.")
def rm(app: App, name: tuple[str, ...]) -> None:
    """Delete names of images; an image is deleted with its last name."""
    remove_each(app, name, app.client.images.delete)


def _show(app: App, image: Image) -> None:
    if app.json:
        app.out.json(image)
        return
    app.out.line(image.names[0] if image.names else image.id)
    app.note(f"  {size(image.size_bytes)}, {image.id}")
    for warning in image.warnings:
        app.note(f"  {warning}")


for each in (ls, pull, import_, rm):
    images.add_command(each)
