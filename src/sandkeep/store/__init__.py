"""Metadata: projects, tokens, sandboxes, sessions, processes, snapshots, drives, events.

=============  ==================================================================================
`facade`       `Store`, one attribute per noun, transactions over all of them
`rows`         the frozen values that go in and come out
`sandboxes`…   one module per noun, holding all SQL about it
`pages`        cursors that stay correct while rows come and go
`tables`       rows to columns and back; `database` what is asked of a database; `sqlite` the embedded one
`migrations`   the schema as ordered steps
=============  ==================================================================================

What callers may rely on:

* Every call is synchronous and made on the event loop's thread: a statement takes microseconds. Time is
  always an argument, and so are ids, so a caller's transaction is a function of its inputs.
* A call returns when its effect is committed (or part of the caller's `Store.transaction`), which survives
  ``kill -9``; `Store.sync` makes it survive loss of power.
* Anything that belongs to a project takes the project first and sees nothing else. Three kinds of exception
  say so in their names: ``find`` by a session, snapshot or process id returns the row with its project, for
  the caller to compare; ``…_on_host`` and ``…_everywhere`` are for the server's own upkeep.
* ``find`` returns ``None`` for what is not there, ``get`` raises `sandkeep.errors.NotFound`.

Another database takes part by implementing `database.Database` and by running the same steps: statements
use ``$1`` parameters, ``RETURNING``, row values, partial indexes and ``ON CONFLICT``, which PostgreSQL
reads as they are. Text sorts by its bytes (``COLLATE "C"`` there), ``BLOB`` is ``BYTEA`` and the events'
sequence an identity column. A remote database answers in hundreds of microseconds, so there the calls run
in threads, one connection each.
"""

from sandkeep.store.facade import Store
from sandkeep.store.pages import Page, PageRequest

__all__ = ["Page", "PageRequest", "Store"]
