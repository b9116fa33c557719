"""`python -m sglang ...`: the `sglang` command where the console script is not on the path.

Must not do anything of its own.
"""

import sys

from sglang.cli import main

sys.exit(main())
