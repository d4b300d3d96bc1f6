"""Hardware health: what a reading means, and the sources readings come from."""
