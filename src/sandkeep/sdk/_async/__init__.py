"""The SDK as it is written: asynchronous. ``scripts/unasync.py`` turns it into :mod:`sandkeep.sync`."""
