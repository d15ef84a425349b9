"""References to secrets in header values: ``Bearer ${secret:NAME}``.

A policy is stored, shown and compared with the reference; the value is put in when a request leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from sandkeep.policy import NetworkPolicy, Transform

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_REFERENCE: Final = re.compile(r"\$\{secret:([^}]*)\}")


def fill_in(value: str, secrets: Mapping[str, str]) -> str:
    """Replace every reference in a header value. Raises ``KeyError`` for a missing secret."""
    return _REFERENCE.sub(lambda found: secrets[found[1]], value)


def refers(value: str) -> bool:
    """Whether a header value refers to a secret."""
    return _REFERENCE.search(value) is not None


def references(policy: NetworkPolicy) -> Iterator[tuple[str, str]]:
    """Yield each secret a policy refers to, with the field that does."""
    for domain in policy.domains:
        for index, rule in enumerate(domain.rules):
            if isinstance(rule.action, Transform):
                for name, value in rule.action.headers:
                    for found in _REFERENCE.finditer(value):
                        yield found[1], f'domains["{domain.pattern}"][{index}].transform.headers["{name}"]'
