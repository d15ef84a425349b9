"""Isolation with Linux namespaces, in pure Python: the driver that needs nothing installed."""
