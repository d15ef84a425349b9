"""The layers below a layer, as far as the store can read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sandkeep.host.layers.values import Layer


class Below:
    """Reads the records of ``layers``; for other layers it uses ``parents``."""

    def __init__(self, layers: Mapping[str, Layer], parents: Mapping[str, str | None]) -> None:
        self._layers = layers
        self._parents = parents
        self.unknown: set[str] = set()
        """Layers reached by ``reach`` whose lower layers are unknown."""

    def reach(self, tops: Iterable[str]) -> set[str]:
        """Return the layers and all below them, including those below their replaced directories."""
        found: set[str] = set()
        pending: list[str | None] = [*tops]
        while pending:
            at = pending.pop()
            if at is None or at in found:
                continue
            found.add(at)
            if at in self._layers:
                pending.append(self._layers[at].parent)
                pending.extend(retired.parent for retired in self._layers[at].retired)
            elif at in self._parents:
                pending.append(self._parents[at])
            else:
                self.unknown.add(at)
        return found
