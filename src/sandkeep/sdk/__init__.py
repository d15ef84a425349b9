"""What stands behind ``import sandkeep``: handles, transport and the values they return.

Plain code, shared by both colours:

- ``values``: what handles and queries return     - ``queries``: what may be asked for
- ``bodies``: requests as the wire spells them    - ``output``: the frames of an output log
- ``target``: where the server is                 - ``retry``: which failures may be repeated, and when
- ``tarball``: trees as tar streams               - ``local``: files on this side
- ``address``: unix sockets with long paths       - ``websocket``: frames of an interactive terminal

Everything that waits is written once, in ``_async``, and turned into :mod:`sandkeep.sync` by
``scripts/unasync.py``. The few names that differ are in the pair ``concurrent`` and ``blocking``. Nothing
here imports the server, the engine or the host.
"""
