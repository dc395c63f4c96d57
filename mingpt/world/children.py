"""How a process of this package starts Python again, so that no file of the current folder stands for a package.

Code of the user's own lies there: config/imports.py finds it, after all packages.
"""

import sys
from multiprocessing import util
from pathlib import Path

START = str(Path(__file__).with_name("start"))  # `python START MODULE` in place of `python -m MODULE`


def keep_from_current_folder() -> None:
    """Have multiprocessing's children, which are `python -c`, not search the current folder before all else."""
    # They import their packages by this process's sys.path, which they are sent. -P is not in Python 3.10, and -I also
    # ignores the variables PYTHON…, of which they need none then.
    flags = util._args_from_interpreter_flags  # type: ignore[attr-defined] # what sets them is not public
    here = "-P" if sys.version_info >= (3, 11) else "-I"
    util._args_from_interpreter_flags = lambda: [*flags(), here]  # type: ignore[attr-defined]
