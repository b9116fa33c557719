"""Owns the door of `python scripts/train_draft/main.py`: the scripts folder goes on the path.

Run by people. It must not do anything else.
"""

import sys
from pathlib import Path

# A file that is run directly has its own folder on the path; the package stands one above.
_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(_FOLDER.parent), *(entry for entry in sys.path if entry != str(_FOLDER))]

from train_draft.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
