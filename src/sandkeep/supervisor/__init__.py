"""The trusted process that owns one session. Standard library only.

It outlives whoever asked for it and is the only one who speaks to the session's init. ``loop`` waits,
``process`` runs and records, ``outputlog`` keeps what processes print, ``files`` reads and writes the
session's files from outside, ``checkpoint`` copies its upper while it runs, ``protocol`` is what all of
that looks like on the control socket.
"""
