"""The engine decides what happens to sandboxes, above the hosts that run them and the store of their rows.

``engine``      `Engine`: every noun over one store and one host; the server holds it
``context``     what the parts share: store, host, settings, clock, locks
``settings``    what an operator configures for an installation
``checks``      whether the values of settings are usable
``sandboxes``   create, get, resume, fork, change, destroy
``batches``     several sandboxes by one request, all of them or none
``sessions``    operations of callers on sessions, the gate, the watch, restarts of the server
``starting``    starts a session: row, host, network, content
``endings``     ends a session; can be repeated after a crash at any step
``keeping``     makes snapshots of what sessions wrote
``beginnings``  a session before it has started: its first row, and its specification; no I/O
``lifecycle``   the states of a session and what each operation may do in each; tables, no I/O
``limits``      refuses exact limits that this host cannot hold a session to
``activity``    when each session was last used, for the idle timeout
``configuration``  options of a sandbox as columns of the store, and back
``processes``   processes of sessions: started here, or observed elsewhere
``tunnels``     connections to ports of a running session
``files``       files of a running session
``snapshots``   get, delete, the tree, retention
``retention``   which snapshots to keep; pure functions
``drives``      named filesystems, mounted into sandboxes
``images``      which project owns each image, and what each caller may have the server fetch
``sources``     fills a new sandbox from a git repository or a tar archive
``fetching``    fetches a git repository with a confined git
``network``     registers sessions with netd: their listeners, policies and secrets
``netd_client``  finds or starts the process netd, and connects to it
``ports``       URLs and tokens of sandboxes' ports
``network_events``  writes netd's reports to the store
``services``    what the parts that `Context` constructs may use of it
``policies``    network policies as stored, with every header value sealed
``secrets``     secrets by logical name: sealed in the store, opened for netd and processes
``sealing``     AES-GCM under a key of the installation
``keys``        the installation's own secret, and keys derived from it
``authority``   the installation's certificate authority, and how sessions come to trust it
``names``       readable names, sortable ids, and what a name may be
``matching``    whether an existing sandbox is configured as a caller asks; no I/O
``upkeep``      chores: missed deadlines, idle sessions, expiry, durability, garbage
``garbage``     deletes what no row needs; sets aside what the store does not know
``reserve``     disk space in the data directory, kept for a full disk
``damage``      which sandboxes need layers that cannot be used
``repairs``     restores what can be restored
``inspection``  checks a data directory for damage, and changes nothing
``adoption``    takes a data directory as it is: unknown files become sandboxes again
"""
