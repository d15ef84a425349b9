"""Thin wrappers of kernel interfaces, under the kernel's names: standard library only, no policy.

``syscalls``   constants and wrappers named after the man page, raising ``OSError`` with the call's name
``capabilities``  drops capabilities from the bounding set
``seccomp``    the system-call filter, assembled as raw BPF
``cgroup``     v2, v1 and hybrid control groups behind one interface
``overlay``    the ways to mount an overlay, each returning a detached mount
``btrfs``      creates, snapshots and destroys btrfs subvolumes
``netlink``    the few rtnetlink messages a session's network namespace needs
``sockets``    messages with file descriptors over unix sockets
``openfiles``  raises this process's limit of open files, not its children's
"""
