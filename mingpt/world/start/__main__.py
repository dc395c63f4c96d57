"""`python FOLDER_OF_THIS MODULE …` is `python -m MODULE …`, but runs no file of the current folder.

`-m` puts the current folder before all packages: a torch.py in a stranger's folder would run. Of a program that is a
folder Python puts that one there, in which there is nothing but this file. (The option -P does the same from 3.11 on.)
"""

import sys
from pathlib import Path
from runpy import run_module

sys.path[0] = str(Path(__file__).parents[3])  # the package of whoever has started this, be it installed or not
import mingpt  # noqa: E402, F401

sys.path.append(sys.path.pop(0))  # multiprocessing's children look for it there
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
