"""Owns a fake rank that stops itself by SIGSTOP before it is ready; SIGCONT lets it go on.

For `rank_module=`: a test that stopped a fake rank itself would sometimes come too late. It must not differ
from `fake_rank` in anything else.
"""

from __future__ import annotations

import os
import signal
import sys

from sglang.test.fakes import fake_rank

#: This module's name, for `rank_module=`.
FAKE_STOPPED_RANK = "sglang.test.fakes.fake_stopped_rank"

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(fake_rank.main())
