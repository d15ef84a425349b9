"""Images: read-only root filesystems that sessions' layers are stacked on.

``ImageStore`` is the facade. It runs in the worker process, where it is uid 0 over the ids a sandbox may own.

``store``      `ImageStore`: which images exist, under which names, and how to add one
``image``      one image as a frozen value, and its JSON form on disk
``records``    unpacked layers, and the records of images made of them
``hostimage``  the ``host`` image: a skeleton over the machine's own ``/usr``
``registry``   fetches an image from a registry: verified, several layers at a time, resumable
``transport``  HTTP to one registry: authentication, redirects, retries
``reference``  names of images in registries
``oci``        image manifests, OCI layouts and docker archives
``unpack``     unpacks an archive into one overlay directory
``streams``    decompresses by magic number, and hashes the bytes it passes on
``adapt``      one small layer over an image, with the files that every sandbox relies on
``tree``       writes one overlay directory: files, owners, whiteouts, attributes
``view``       reads an image's merged layers before a session mounts them
``allowance``  how much disk and time one pull may use
``files``      the store's own files: locks and atomic replacement

``sudo.sh`` is the program ``sudo`` of the ``host`` image and of adapted images.
"""

from sandkeep.host.images.image import Image
from sandkeep.host.images.store import ImageStore

__all__ = ["Image", "ImageStore"]
