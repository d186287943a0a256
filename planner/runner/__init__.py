"""Running plans: a pool of processes, and `verify`."""
