"""The command line. The commands are in ``commands``; the modules here are what they are made of.

``commands``     the commands, one module per noun
``main``         the entry point; prints help and version without importing click
``table``        the table of commands: names, modules, summaries
``tree``         the click group of all commands: running, help, completion
``framework``    parameters, commands and groups
``app``          one run of a command: client, output, progress
``options``      options that several commands share
``values``       durations, sizes, pairs and mounts as click types
``exit_status``  exit statuses, error messages and hints
``batch``        the same operation on several things, and confirmation
``listing``      paged listings
``present``      values of the SDK as JSON and in words
``output``       tables, JSON, colours, words for sizes and times
``progress``     spinners and progress bars
``completion``   completion of names of sandboxes
``follow``       a process without a terminal: output, input, signals
``logparts``     parts of an output log: last lines, since a time
``attach``       a process on a terminal
``interrupts``   signals that end the program, as exceptions
``holdings``     what a data directory holds
"""
