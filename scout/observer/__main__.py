"""``python -m scout.observer``: started by `start_observer`, with its configuration on stdin."""

import sys

from scout.observer.process import main

sys.exit(main())
