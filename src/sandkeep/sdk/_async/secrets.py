"""Secrets of the project."""

from __future__ import annotations

from sandkeep.errors import NotFound
from sandkeep.sdk._async.transport import Transport, decode, segment
from sandkeep.sdk.network import Secret
from sandkeep.wire.secrets import SecretList, SecretShown


class Secrets:
    """Values that rules of network policies and processes get, by name. Reached as ``Client.secrets``.

    A rule refers to one as ``${secret:name}``, a process as ``secrets={"VARIABLE": "name"}``. Values are
    stored sealed and are never returned.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Secret]:
        """Return every secret of the project, by name; without values."""
        response = await self._transport.request("GET", "/v1/secrets")
        return [Secret.of(secret) for secret in decode(SecretList, response).secrets]

    async def set(self, name: str, value: str) -> Secret:
        """Store a value, replacing the previous one. Running sessions whose rules use it get it immediately.

        Args:
            name: letters, digits, ``_``, ``.`` and ``-``.
            value: text of up to 64 KiB. Rules can use one line that fits into an HTTP header only.

        Raises:
            InvalidRequest: the name or value is invalid.
            HostCannot: the server cannot seal values; it needs ``sandkeep[net]``.
        """
        response = await self._transport.request(
            "PUT", f"/v1/secrets/{segment(name)}", json={"value": value}, replay=True
        )
        return Secret.of(decode(SecretShown, response).secret)

    async def delete(self, name: str) -> None:
        """Delete a secret. Requests whose rules use it are refused from now on.

        Raises:
            NotFound: it does not exist.
        """
        await self._transport.request("DELETE", f"/v1/secrets/{segment(name)}", done=NotFound)
