"""SCOUT: who among equivalent peers is wrong, slow or silent, and which checkpoint to trust.

Knows tensors and peers; knows nothing of sockets, processes or restarts.  Importing this package
loads neither torch nor anything outside the standard library.
"""
