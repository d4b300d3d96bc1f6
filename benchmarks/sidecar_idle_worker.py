"""A rank that trains without torch: one step a second, printed, and published in its page.

The session is the shim's own: its connection, its heartbeat.
"""

import os
import time

import worker_shim
from scout.hang import Phase
from scout.progress import PageWriter
from worker_shim.messages import PROGRESS_PAGE_ENV, PROGRESS_TOKEN_ENV

LINE = (
    " iteration {step:8}/  500000 | consumed samples: {samples:12} | elapsed time per iteration"
    " (ms): 1000.4 | throughput per GPU (TFLOP/s/GPU): 412.7 | learning rate: 2.871600E-04 |"
    " global batch size:  2048 | lm loss: 2.104583E+00 | loss scale: 1.0 | grad norm: 0.712 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)

worker_shim.attach()
page = PageWriter.open(os.environ[PROGRESS_PAGE_ENV], int(os.environ[PROGRESS_TOKEN_ENV]))
step = 0
while True:
    step += 1
    page.publish(step, Phase.FORWARD)
    print(LINE.format(step=step, samples=step * 2048), flush=True)
    time.sleep(1.0)
