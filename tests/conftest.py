"""What holds for every test."""

import os
import signal

from hypothesis import settings

# A machine that does other work takes any time for any example; a test is right or wrong, not late.
# It is right or wrong each time, too: `make fuzz` and `make simulate` are where dice are rolled.
settings.register_profile("outrider", deadline=None, derandomize=True)
settings.register_profile("dice", deadline=None)
settings.load_profile("dice" if "FUZZ_SECONDS" in os.environ else "outrider")

# Under nohup, or behind a shell's `&`, signals come ignored and would stay so in what tests start.
# A handler, unlike SIG_IGN, does not outlive exec.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
