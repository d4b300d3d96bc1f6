"""What holds for every test."""

from hypothesis import settings

# A machine that does other work takes any time for any example; a test is right or wrong, not late.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
