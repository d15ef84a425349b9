"""Layers: where the changes a session made go, and how a later session finds them; see ``store.py``."""

from sandkeep.host.layers.store import LayerStore, Recovery
from sandkeep.host.layers.values import Layer

__all__ = ["Layer", "LayerStore", "Recovery"]
