"""``sandkeep images``: what sandboxes start from."""

from sandkeep.cli.framework import Group

images = Group("images", "Manage the images sandboxes start from.", aliases={"list": "ls", "delete": "rm"})
