"""The SDK as it is written: asynchronous. ``scripts/unasync.py`` turns it into :mod:`sandkeep.sync`.

``api``           the functions of the module ``sandkeep``, on the default client
``client``        `Client`: everything that can be asked of one server, in one project
``sandbox``       `Sandbox`: the handle that everything else hangs on
``running``       runs processes, for a sandbox and for its users
``process``       `Process`: a handle like ``subprocess.Popen`` with a durable output log
``processlog``    output and input of a process, by its id
``streams``       output and input of a process as streams: bytes, and text over them
``linereader``    reads lines: the common part of output streams and open files
``terminal``      interactive terminals
``forwarding``    ports of a sandbox on this machine
``files``         `Files`: the files of a sandbox, with names from ``os`` and ``pathlib``
``filerequests``  the requests behind file operations
``syncing``       the part of `Files` that makes two directories alike
``treesync``      one such sync: list, compare, remove, move
``openfile``      files opened in a sandbox, streamed in pieces
``batch``         many writes in one request
``watching``      changes below a directory of a sandbox, as they happen
``accounts``      users and groups inside a sandbox
``images``        images of the server's machine
``secrets``       secrets of the project
``events``        events of the project: those there are, or as they happen
``many``          several sandboxes that one request made
``listing``       fetches each kind of list, a page at a time
``paging``        lists that come in pages: item by item, or page by page
``recovery``      when a session ends under an operation: resume once, repeat once
``transport``     requests to one server: pooled connections, failures told apart, safe repeats
``unix_http``     requests over a unix socket, with little overhead
"""
