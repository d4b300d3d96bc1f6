"""Replaying parts of a training step on every peer and comparing what came out.

The torch half of `scout`: nothing here is imported by ``import scout``.  It knows modules,
optimizers and process groups, and nothing of sidecars, sockets or restarts.
"""
