"""Secrets of the project."""

from __future__ import annotations

from sandkeep.sdk._async.transport import Transport, read, segment
from sandkeep.sdk.network import Secret
from sandkeep.wire.secrets import SecretList, SecretShown


class Secrets:
    """Values that rules of network policies inject, by name. Reached as ``Client.secrets``.

    A rule refers to one as ``${secret:name}``. Values are kept sealed and are never given back.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Secret]:
        """Every secret of the project, by name; without values."""
        answer = await self._transport.request("GET", "/v1/secrets")
        return [Secret.of(secret) for secret in read(SecretList, answer).secrets]

    async def set(self, name: str, value: str) -> Secret:
        """Store a value, in place of the one before. Running sessions whose rules name it get it at once.

        Args:
            name: letters, digits, ``_``, ``.`` and ``-``.
            value: one line of text that fits into an HTTP header.

        Raises:
            InvalidRequest: it is not such a name or value.
            HostCannot: the server has no means to seal it; it needs ``sandkeep[net]``.
        """
        answer = await self._transport.request(
            "PUT", f"/v1/secrets/{segment(name)}", json={"value": value}, replay=True
        )
        return Secret.of(read(SecretShown, answer).secret)

    async def delete(self, name: str) -> None:
        """Forget a value. Requests whose rules name it are refused from now on.

        Raises:
            NotFound: there is none.
        """
        await self._transport.request("DELETE", f"/v1/secrets/{segment(name)}")
