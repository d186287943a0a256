"""The command line: one file per command, each a thin way from one data type to the next."""
