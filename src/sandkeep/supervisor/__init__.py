"""The trusted process that owns one session. Standard library only.

The supervisor outlives the server that started it, and only the supervisor talks to the session's init.

``session``      one session from its start to its end: requests, deadline, stop
``reactor``      the event loop
``connection``   one control connection, its requests and responses
``initlink``     messages to and from init
``request``      reads a request to start a process
``processes``    all processes of the session: start, output, signals, end
``process``      one process: state, standard input, record
``identity``     users and groups of the session, and acting as one of them
``files``        file operations, one at a time
``fileops``      file operations that carry data, on threads of their own
``lines``        a range of lines of a file
``atomicwrite``  files written in place, or under no name until they are complete
``direct``       file content moved between a file and a client's socket by the kernel
``archive``      trees as tar archives, out of the session
``extract``      tar archives unpacked into the session
``comparing``    a tree that a client compares with its own: listed, and thinned out
``tree``         walks over a session's tree that no symbolic link leads out of
``inotify``      changes below a directory, as they happen
``checkpoint``   copies the upper directory while the session runs
``treeindex``    what a checkpoint remembers of the tree between its passes
``limits``       memory and disk limits that no kernel mechanism enforces here
``network``      sockets inside the session's network namespace
"""
