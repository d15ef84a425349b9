"""A session's network: what it may reach, and how it is reached.

``policy`` decides and does no I/O. ``netd`` is the process that enforces: ``egress`` accepts and judges every
connection, ``responder`` and ``names`` are its name server, ``relay`` moves bytes, ``inspect`` applies rules
to requests (over ``http``, ``http1``, ``http2`` and ``tls``), ``ingress`` lets requests in,
``audit`` reports, ``channel`` is how the engine talks to it.
"""
