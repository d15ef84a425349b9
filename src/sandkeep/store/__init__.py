"""Metadata: projects, tokens, sandboxes, sessions, processes, snapshots, drives, events.

``facade``      `Store`: one attribute per noun, transactions over all of them
``rows``        the frozen values that go in and come out
``projects``    the scopes that names, tokens and lists belong to
``tokens``      credentials that act in a project
``sandboxes``   names, configuration, and where each sandbox points
``sessions``    each execution of a sandbox; the only writer of a sandbox's status
``processes``   a record of everything run in a session
``snapshots``   immutable filesystem states, as a tree
``drives``      named filesystems, written by one session at a time
``secrets``     sealed values by logical name, per project
``policies``    network policies in the rows of sandboxes and sessions
``addresses``   a number for each declared port, unique in the installation
``events``      what happened, in the order it was recorded
``identities``  the store's own id, and a number that grows as it changes
``identity``    checks that a store belongs to its data directory
``counting``    counts a store's rows without opening it
``pages``       pages of lists that stay correct while rows come and go
``tables``      frozen rows to database tuples and back
``database``    the interface that a database implements
``sqlite``      the embedded database: one SQLite file in write-ahead mode
``migrations``  the schema as ordered steps

What callers may rely on:

* Every call is synchronous and made on the event loop's thread: a statement takes microseconds. Time is
  always an argument, and so are ids, so a caller's transaction is a function of its inputs.
* A call returns when its effect is committed (or part of the caller's `Store.transaction`), which survives
  ``kill -9``; `Store.sync` makes it survive loss of power.
* Anything that belongs to a project takes the project first and sees no other project's rows. The
  exceptions show in their names: ``find`` by a session, snapshot or process id returns the row with its
  project, for the caller to compare; ``…_on_host`` and ``…_everywhere`` are for the server's own upkeep.
* ``find`` returns ``None`` for a missing row, ``get`` raises `sandkeep.errors.NotFound`.

Another database can be used by implementing `database.Database` and by running the same steps: statements use
``$1`` parameters, ``RETURNING``, row values, partial indexes and ``ON CONFLICT``, which PostgreSQL accepts
unchanged. Text sorts by its bytes (``COLLATE "C"`` there), ``BLOB`` is ``BYTEA`` and the events' sequence an
identity column. A remote database responds in hundreds of microseconds, so there the calls run in threads,
one connection each.
"""

from sandkeep.store.facade import Store
from sandkeep.store.pages import Page, PageRequest

__all__ = ["Page", "PageRequest", "Store"]
