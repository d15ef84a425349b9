"""The host layer: runs sessions on one machine. It does not know sandbox names or HTTP.

``driver``         the interface that an isolation technology implements, and the values that cross it
``reports``        what a driver reports of sessions, processes and files
``channel``        numbered requests and responses on one connection
``native``         the driver of Linux namespaces: zygote, boot, init
``control``        the client of a supervisor's control socket, for event loops
``rootfs``         the parts of a root filesystem: slots of lower directories, read-only binds
``images``         the image store: where root filesystems come from
``layers``         the layer store: the files that sessions wrote
``storage``        images and layers for event loops: the client of the worker
``worker``         the process that does bulk disk work
``start_worker``   the script that the worker process runs
``datadir``        how a data directory is recognised, and which processes belong to it
``uninstall``      removes a data directory with everything that runs in it
``remover``        measures and removes files with the rights of the user who made them
``start_remover``  the script that the remover process runs
``doctor``         what this machine can and cannot do
"""
