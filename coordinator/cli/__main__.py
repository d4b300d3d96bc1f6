"""``python -m coordinator.cli`` is ``outrider``, also where its script is not on the path."""

import sys

from coordinator.cli.main import main

sys.exit(main())
