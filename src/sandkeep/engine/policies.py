"""Network policies at rest: the complete form as JSON, with every header value sealed.

Values of headers that rules set, respond with or match are often credentials. A sealed value is bound to its
project. Names, domains and addresses stay readable, because they are shown to callers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

import msgspec

from sandkeep.engine.sealing import Seal, Unopened
from sandkeep.engine.services import Services
from sandkeep.errors import HostCannot, NoSpace, StoreError
from sandkeep.policy import NetworkPolicy
from sandkeep.policy_json import authored, read

_SEALED: Final = "sealed"
"""True in rows whose values are sealed. Rows of earlier versions do not have it."""
_HIDDEN: Final = "-"


class Policies:
    """Seals policies of sandboxes and sessions for the store, and opens them again."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._seal = Seal(services.data_dir, "policies")

    def stored(self, project: str, policy: NetworkPolicy) -> dict[str, Any]:
        """Return a policy as the store keeps it."""
        return self._sealed(project, msgspec.to_builtins(authored(policy)))

    def complete(self, project: str, stored: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the complete form of a stored policy, for netd.

        Raises:
            StoreError: the values were sealed with another installation's key.
        """
        if stored is None or not stored.get(_SEALED):
            return stored

        def opened(value: str) -> str:
            return self._seal.open(base64.b64decode(value), _binding(project))

        try:
            found = _with_values(stored, opened)
        except (Unopened, ValueError):
            raise StoreError(
                "a network policy was sealed with another installation's key",
                path=self._services.data_dir,
                hint="restore keys/master, or set the policy again",
            ) from None
        del found[_SEALED]
        return found

    def policy(self, project: str, stored: Mapping[str, Any] | None) -> NetworkPolicy:
        """Return a stored policy with its values."""
        return read(self.complete(project, stored))

    def seal_plain(self) -> None:
        """Seal values that an earlier version wrote in plain text, and purge them from the store's files."""
        rows = self._services.store.policies.unsealed(_SEALED)
        sealed = 0
        if not rows:
            return
        try:
            with self._services.store.transaction():
                for row in rows:
                    stored = self._sealed(row.project, row.policy)
                    if stored.get(_SEALED):
                        self._services.store.policies.replace(row, stored)
                        sealed += 1
            if sealed:
                self._services.store.rewrite()
                self._services.log("header values of policies were sealed", rows=sealed)
        except (HostCannot, NoSpace) as error:
            # Without cryptography rules cannot be applied either; on a full disk the server must still start,
            # so that its users can delete something.
            self._services.log("policies stay in plain text", level="warning", why=str(error))

    def _sealed(self, project: str, plain: Mapping[str, Any]) -> dict[str, Any]:
        count = 0

        def seal(value: str) -> str:
            nonlocal count
            count += 1
            return base64.b64encode(self._seal.seal(value, _binding(project))).decode()

        stored = _with_values(plain, seal)
        return {**stored, _SEALED: True} if count else stored


def shown(stored: Mapping[str, Any] | None) -> NetworkPolicy:
    """Return a stored policy to be shown: sealed values are not opened, but replaced by a dash."""
    if stored is not None and stored.get(_SEALED):
        stored = _with_values(stored, lambda _: _HIDDEN)
    return read(stored)


def _with_values(stored: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a stored policy with each header value changed."""
    found: dict[str, Any] = deepcopy(dict(stored))
    domains = found.get("allow")
    for rules in domains.values() if isinstance(domains, dict) else ():
        for rule in rules:
            for part in (*rule.get("transform", ()), rule.get("response", {})):
                if "headers" in part:
                    part["headers"] = {name: change(value) for name, value in part["headers"].items()}
            for pair in rule.get("match", {}).get("headers", ()):
                if "value" in pair:
                    pair["value"] = {kind: change(value) for kind, value in pair["value"].items()}
    return found


def _binding(project: str) -> str:
    return f"policy\0{project}"
