"""The commands of ``sandkeep``, one module per noun; ``sandkeep.cli.table`` lists them all.

``run``         ``run``: a command in a new or a named sandbox
``create``      ``create``, ``fork`` and ``sh``: new sandboxes
``sandboxes``   ``ls``, ``stop`` and ``rm``
``prune``       ``prune``: removes what has been stopped for long
``config``      ``config``: the configuration of a sandbox
``execute``     ``exec``, ``connect`` and ``attach``: commands and shells in existing sandboxes
``processes``   ``ps``, ``logs`` and ``kill``
``files``       ``cp`` and ``cat``: copy files and directories to and from a sandbox
``sync``        ``sync``: makes a local directory and one of a sandbox alike
``snapshots``   ``snapshot``, ``checkpoint``, ``rollback`` and ``snapshots``
``sessions``    ``sessions``: the sessions of a sandbox
``events``      ``events``: events and who caused them
``drives``      ``drives``: named filesystems that sandboxes mount
``images``      ``images``: the images that sandboxes start from
``network``     ``net``: the network activity of a sandbox
``forward``     ``port-forward``: ports of a sandbox on this machine
``secrets``     ``secret``: values for network rules and commands
``serve``       ``serve``: the server in the foreground
``tokens``      ``token``: tokens for clients that connect over TCP
``status``      ``status``: which server is used, and whether it runs
``server``      ``server``: the server that clients start in the background
``repair``      ``repair``: finds damage and repairs it where possible
``doctor``      ``doctor``: what this machine can do
``uninstall``   ``uninstall``: removes the data directory
``completion``  ``completion``: the script that shells complete with
``version``     ``version``
"""
