"""What sandboxes do, above the hosts that run them and the store that remembers them.

=============  =======================================================================================
`lifecycle`    the states of a session and what each operation may do in each; tables, no I/O
`retention`    which snapshots and layers to keep; pure functions
`names`        readable names, sortable ids, and what a name may be
=============  =======================================================================================
"""
