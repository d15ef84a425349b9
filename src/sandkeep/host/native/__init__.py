"""The driver that isolates with Linux namespaces, in pure Python, with nothing to install.

``driver``         `NativeDriver`: asks the zygote for sessions, finds them again after a restart
``zygote_client``  the driver's connection to the zygote, which it restarts when the zygote died
``zygote``         the fork server: a small single-threaded process that every supervisor is forked from
``start_zygote``   the script that the zygote process runs
``boot``           turns a specification into a running init, in the supervisor
``mounts``         mounts made outside the session: overlay slots, device tree, binds
``inside``         turns a bare clone into an isolated PID 1, in init itself
``init``           PID 1 of a session: spawns what the supervisor asks for, reaps everything
``mode``           whose ids sessions have: root's, a range of subordinate ones, or a single one
``idrange``        ranges of 65,536 ids, one per session of root
``ways``           finds the way of mounting overlays that works on this machine
``scope``          a systemd scope for the zygote and every session
``inotify``        how many inotify instances and watches sessions may use
``files``          typed file requests to a session's supervisor
``messages``       the JSON between the driver and its supervisors
``network``        fetches a session's network descriptors from its supervisor
"""
