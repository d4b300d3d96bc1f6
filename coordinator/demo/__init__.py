"""A local cluster that trains a real model, is broken on purpose, and shows the recovery."""
