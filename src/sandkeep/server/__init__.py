"""The HTTP API: what official clients, our own client and the command line speak.

=============  =======================================================================================
`app`          one ASGI application: match, authenticate, limit, answer; errors in one JSON shape
`router`       the table of routes, shared with the OpenAPI document
`http`         a request, the replies there are, and how each is sent
`routes`       one module per noun; `show` turns rows into the objects of the wire
`output`       a process's output as text records or exact bytes, coalesced, with backpressure
`terminal`     interactive sessions over WebSocket
`auth`         who asks, and in which project
`serve`        listening: unix socket, TCP, signals, locks, idle exit; `listen` the protocol it uses
`embedded`     how a client finds a server, or starts one
=============  =======================================================================================

Sessions do not depend on this process: it may be stopped or killed at any time.
"""
