"""`python -m mingpt.preflight`, which is in command.py."""

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
    os._exit(code)  # without waiting for threads whose nodes do not answer
