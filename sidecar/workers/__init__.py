"""The worker processes of this node: starting, hearing, ending them."""
