"""Every endpoint, one module per noun.

``sandboxes``  create, get and resume, list, change, fork, delete
``batches``    create and fork several at once
``sessions``   list, get, stop, extend, snapshot, checkpoint, network policy, terminals, usage
``commands``   commands, as official clients call processes: run, get, wait, logs, signals, input
``processes``  processes in full: records of every kind, exact output, processes observed elsewhere
``files``      files of a running session
``trees``      trees of it that a client compares with its own
``snapshots``  list, tree, get, delete
``drives``     get or create, get, list, fork, delete
``images``     list, pull, import, delete
``secrets``    set, list, delete; no response holds a value
``events``     what happened in a project, as pages or as it happens
``tokens``     tokens, for the local user
``repairs``    looks for damage, and repairs what can be repaired
``meta``       health, version, the OpenAPI document, the scopes that clients ask about
``login``      where the vendor's command line is sent to log in
``common``     helpers of several nouns
"""

from sandkeep.server.router import Endpoint
from sandkeep.server.routes import (
    batches,
    commands,
    drives,
    events,
    files,
    images,
    login,
    meta,
    processes,
    repairs,
    sandboxes,
    secrets,
    sessions,
    snapshots,
    tokens,
    trees,
)


def all_endpoints() -> list[Endpoint]:
    modules = (
        sandboxes,
        batches,
        sessions,
        commands,
        files,
        trees,
        snapshots,
        drives,
        images,
        secrets,
        processes,
        events,
        tokens,
        repairs,
        meta,
        login,
    )
    return [endpoint for module in modules for endpoint in module.table.endpoints]
