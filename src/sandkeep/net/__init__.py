"""A session's network: what it may reach, and how it is reached.

``policy`` decides and does no I/O.
"""
