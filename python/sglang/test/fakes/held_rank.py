"""Owns a fake rank that a signal holds from its first moment, before it can be ready; SIGCONT lets it go on.

For `rank_module=`: a test that stopped a fake rank itself would come too late now and then. It must not
differ from `fake_rank` in anything else.
"""

from __future__ import annotations

import os
import signal
import sys

from sglang.test.fakes import fake_rank

#: This module's name, for `rank_module=`.
HELD_RANK = "sglang.test.fakes.held_rank"

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(fake_rank.main())
