"""`python -m mingpt.preflight`: see command.py."""

import os
import sys
import traceback

from mingpt.errors import CRASHED, STOPPED
from mingpt.preflight.command import main

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = STOPPED
    except Exception:
        traceback.print_exc()
        code = CRASHED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for nodes that don't answer
