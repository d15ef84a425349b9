"""Code that several processes of the host share: standard library only, light enough for supervisors.

``protocol``       frames between processes
``outputlog``      the output of a process as a file
``processrecord``  the record of a process on disk
``tar``            the part of the tar format that reader and writer share
``tarreader``      reads tar archives as streams
``tarwriter``      writes tar archives as streams
``copying``        copies trees with their attributes
``removal``        removes trees without following links
``ignoring``       patterns of files to leave out, as in ``.gitignore``
``locks``          probes for locks of other processes
``sealed``         small JSON files with a checksum
``jwt``            signed tokens
``clock``          wall-clock time, and time that never jumps
"""
