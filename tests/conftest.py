"""What holds for all tests: output is as wide as where nobody says how wide a screen is, and Ctrl-C
ends what they start, also where a shell has started the tests in the background.
"""

from __future__ import annotations

import os
import signal

for _name in ("COLUMNS", "LINES", "NO_COLOR"):
    os.environ.pop(_name, None)
    # Importing readline, as pytest does, sets the first two behind the back of os.environ, and
    # processes that tests start would have them.
    os.unsetenv(_name)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which a process that is started inherits
    signal.signal(signal.SIGINT, signal.default_int_handler)
