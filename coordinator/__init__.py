"""Decides for the job: who broke, how deep to restart, from which checkpoint, with which ranks."""
