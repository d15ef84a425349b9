"""``sandkeep images``: what sandboxes start from. They belong to the server's machine, not to a project."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli.framework import App, Group, argument, command, finish, option, several
from sandkeep.cli.output import ago, size

if TYPE_CHECKING:
    from sandkeep.sync import Image, Pulled

images = Group(
    "images",
    "Manage the images sandboxes start from. 'host', this machine's own system, is always there.",
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
                ago(image.created_at),
                image.id,
            )
            for image in found
        ]
        app.out.table(("NAME", "KIND", "SIZE", "CREATED", "ID"), rows)
    else:
        app.note("no images yet besides 'host'; 'sandkeep images pull' fetches one")


@command(
    "pull",
    examples=[("and then", "sandkeep run --image debian:12 -- cat /etc/os-release")],
)
@argument("reference", metavar="REFERENCE", help="Such as debian:12 or registry.example.org/name:tag.")
@option("--platform", metavar="OS/ARCH", help="Such as linux/arm64; this machine's own if not given.")
@option("--username", metavar="NAME", help="For the registry; its password is read from SANDKEEP_PASSWORD.")
@option("--insecure", is_flag=True, help="Allow plain HTTP and certificates nobody vouches for.")
def pull(app: App, reference: str, platform: str | None, username: str | None, insecure: bool) -> None:
    """Fetch an image from a registry. What is here already is not fetched again."""
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
            progress=progress,
        )
    _show(app, made)


@command(
    "import",
    examples=[
        ("what docker save wrote", "sandkeep images import app.tar --name app"),
        ("a directory made by debootstrap", "sandkeep images import ./rootfs --name base"),
    ],
)
@argument("path", metavar="PATH", help="A directory or archive on this machine.")
@option("--name", required=True, metavar="NAME", help="What sandboxes will call it.")
@option("--kind", type=click.Choice(_KINDS), help="What it is; found out if not given.")
@option("--reference", metavar="NAME", help="Which image, where a layout or archive holds several.")
def import_(app: App, path: str, name: str, kind: Any, reference: str | None) -> None:
    """Make an image from a root filesystem, an OCI layout, or what 'docker save' wrote."""
    if not os.path.exists(path):
        raise click.UsageError(f"there is no {path} here")
    with app.busy(f"Importing {path}"):
        made = app.client.images.import_(
            os.path.abspath(path), name, kind=kind or _kind(path), reference=reference
        )
    _show(app, made)


def _kind(path: str) -> Any:
    """What a path looks like."""
    if os.path.isdir(path):
        return "oci-layout" if os.path.exists(os.path.join(path, "oci-layout")) else "directory"
    try:
        with tarfile.open(path) as archive:
            # docker save puts its manifest anywhere; a root filesystem has none at its top.
            for entry in archive:
                if entry.name == "manifest.json":
                    return "docker-archive"
    except (tarfile.TarError, EOFError):
        pass  # zstd, perhaps: the server reads that
    return "tar"


@command("rm")
@argument("name", nargs=-1, required=True, metavar="NAME...", help="Names or ids of images.")
def rm(app: App, name: tuple[str, ...]) -> None:
    """Delete names of images and, with its last name, each image."""
    results: list[dict[str, Any]] = []
    for each in dict.fromkeys(name):
        with several(app, results, each) as result:
            app.client.images.delete(each)
            result["removed"] = True
            if not app.json:
                app.out.line(each)
    finish(app, results)


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
