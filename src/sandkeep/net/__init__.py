"""A session's network: what it may reach, and how it is reached.

``policy`` decides and does no I/O; the process netd enforces.

``netd``        the process: the network of every session below one data directory
``start_netd``  the script that the netd process runs
``leash``       the connection to a session's supervisor: its end, and sockets inside
``channel``     requests and responses with descriptors between engine and netd
``confine``     takes rights away from netd and from git
``egress``      accepts and judges every connection a session makes
``sniff``       what the first bytes of a connection say about where it goes
``policy``      the verdict of a policy on a connection or a request; no I/O
``responder``   the name server that every session sees
``names``       addresses that stand for names, per session
``resolver``    names to addresses, by asking the machine's name servers
``dns``         DNS messages: read and written, no I/O
``relay``       moves bytes between two sockets with ``splice``
``inspect``     applies rules to requests: TLS ended here, requests changed or refused
``http``        one shape of request and response for both versions of HTTP
``http1``       HTTP/1.1 on both sides of the proxy
``http2``       HTTP/2 on both sides of the proxy
``frames``      counts the frames of HTTP/2 before they are read
``tls``         certificates for domains whose requests are inspected
``tokens``      tokens that tell the receiver of a forwarded request which session sent it
``secrets``     references to secrets in header values
``ingress``     lets requests from outside in to a session's ports
``turns``       fair turns: one session cannot keep netd's one thread from the others
``audit``       reports decisions to the engine
``git``         runs git for a source in a confined process
``start_git``   the script that the git process runs
"""
