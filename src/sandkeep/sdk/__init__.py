"""The code behind ``import sandkeep``: handles, transport and the values they return.

Everything that waits is written once, in ``_async``, and turned into :mod:`sandkeep.sync` by
``scripts/unasync.py``; the names that differ are in the pair ``_compat_async`` and ``_compat_sync``. The
other modules are shared by both halves. Nothing here imports the server, the engine or the host.

``_async``         handles, client and transport, as they are written: asynchronous
``_compat_async``  the names that differ between the two halves, for asyncio and trio
``_compat_sync``   the same names for plain threads
``values``         the frozen values that handles and queries return
``sandboxes``      sandboxes and sessions: keywords of callers, values and properties of responses
``queries``        what may be asked for in lists
``references``     handles written down: values that name a sandbox or a process and its server
``events``         events of a project, as values
``network``        secrets and network events, as values
``images``         images, as values
``image_config``   what an image's author configured, as values
``repairs``        the result of a repair, as values
``bodies``         requests as the wire spells them, from the arguments of a call
``target``         where the server is, and as whom to talk to it
``address``        unix sockets with long paths, and whom to trust over TLS
``http1``          HTTP/1.1 over a unix socket, without I/O
``websocket``      frames of an interactive terminal's connection, without I/O
``retry``          which failures may be repeated, after how long, and when to give up
``preparing``      what the start of a sandbox waits for
``output``         output frames read from a response
``sinks``          where the output of ``run_process`` goes: the result, a file, a stream, nowhere
``content``        local files as bodies of requests and of responses
``local``          local files of an upload or download
``comparing``      what differs between a local tree and one of a sandbox
``tarball``        trees as tar streams
"""
