"""What a guest needs in any case, done once in a process that workers are forked from.

Importing this loads the guest's modules and looks up who has which of torch's functions.  It
connects nothing and changes nothing.
"""

import worker_shim.attachment  # noqa: F401 - so that no worker has to load it
from worker_shim.patching import SURVEY

SURVEY.take()
