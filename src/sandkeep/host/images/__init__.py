"""Images: read-only root filesystems a session's snapshots are stacked on.

``ImageStore`` is the facade. It runs in the worker process, where it is uid 0 over the ids a sandbox may own.
"""

from sandkeep.host.images.image import Image
from sandkeep.host.images.store import ImageStore

__all__ = ["Image", "ImageStore"]
