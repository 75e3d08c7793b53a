"""The command line: arguments, one function per command, and all printing of results."""
