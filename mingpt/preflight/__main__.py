"""`mingpt preflight`, which is in command.py."""

import sys
import traceback
from typing import NoReturn

from mingpt.command import INTERRUPTED
from mingpt.errors import CRASHED


def main() -> NoReturn:
    try:
        from mingpt.preflight import command  # which takes a second; Ctrl-C may come meanwhile

        code = command.main(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        traceback.print_exc()
        code = CRASHED
    sys.exit(code)


if __name__ == "__main__":
    main()
