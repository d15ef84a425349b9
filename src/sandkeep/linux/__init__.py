"""The kernel, said the kernel's way: thin wrappers, standard library only, no policy.

``syscalls``  constants and wrappers named after the man page, raising ``OSError`` with the call's name
``seccomp``   the system-call filter, assembled as raw BPF
``cgroup``    v2, v1 and hybrid control groups behind one interface
``netlink``   the few rtnetlink messages a session's network namespace needs
"""
