"""Outrider's guest in the training process."""
