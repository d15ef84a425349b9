"""Layers: the files that sessions changed, kept so that later sessions can start from them.

``store``     `LayerStore`: publish, look up, compose, reference, measure, delete, recover
``values``    a layer as a value, and its ``meta.json``
``marks``     which holders need a layer, as empty files in its directory
``sessions``  session directories as the store sees them: layers they need, uppers they left
``fold``      merges several overlay directories into one that shows the same files
``tree``      walks and removes trees that a sandbox has made
``below``     the layers below a layer
``repair``    finds damaged layers and restores a layer's record
``lock``      locks of the store that exclude threads and processes alike
``btrfs``     makes the data directory a subvolume where it is on btrfs
"""

from sandkeep.host.layers.store import LayerStore
from sandkeep.host.layers.values import Layer, Recovered

__all__ = ["Layer", "LayerStore", "Recovered"]
