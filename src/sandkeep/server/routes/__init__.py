"""Every endpoint, one module per noun."""

from sandkeep.server.router import Endpoint
from sandkeep.server.routes import (
    commands,
    drives,
    events,
    files,
    images,
    meta,
    processes,
    sandboxes,
    secrets,
    sessions,
    snapshots,
)


def all_endpoints() -> list[Endpoint]:
    modules = (
        sandboxes,
        sessions,
        commands,
        files,
        snapshots,
        drives,
        images,
        secrets,
        processes,
        events,
        meta,
    )
    return [endpoint for module in modules for endpoint in module.table.endpoints]
