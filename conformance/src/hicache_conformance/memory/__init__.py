"""A small, correct backend in memory: the first one to read before writing one's own.

Without options the pages live in this process. With ``server`` they live in a
small server process (server.py), which makes it the smallest backend that has
everything a networked one has: connections, deadlines, a store that outlives
its clients. The suite proves both, and proves itself on mutants of both.
"""
