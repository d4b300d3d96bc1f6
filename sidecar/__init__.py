"""The per-node daemon: launches workers, watches them, and tells the coordinator.  No torch."""
