"""The HTTP API, for official clients, our own client and the command line.

``serve``          runs the server on a data directory: sockets, signals, locks, idle exit
``listen``         the HTTP protocol on top of uvicorn: peers, limits, connections that can be lent
``app``            one ASGI application: match, authenticate, limit, respond; errors in one JSON shape
``router``         the table of routes, which the OpenAPI document is made from too
``routes``         every endpoint, one module per noun
``http``           a request as handlers see it, and the responses they return
``auth``           who asks, and in which project
``tokens``         tokens: made, listed and revoked
``present``        rows of the store as the objects clients see
``output``         a process's output on its way to a client, coalesced, with backpressure
``terminal``       interactive terminals over WebSocket
``tunnel``         connections to ports over WebSocket
``logs``           log lines: one event per line, as JSON or as text
``configuration``  reads ``settings.json``
``inspecting``     looks through a data directory for damage without serving it
``adopting``       takes a data directory as it is without serving it

Sessions do not depend on this process: it may be stopped or killed at any time.
"""
