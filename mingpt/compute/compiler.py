"""torch's compiler: how it is set, and the folder in which it keeps what it has compiled."""

import os
import platform
import tempfile
from pathlib import Path

import torch

from mingpt.cli.console import say
from mingpt.config.kinds import CACHE_DIR, Data
from mingpt.config.schema import Config
from mingpt.files.localfile import own_folder
from mingpt.world.env import Env

FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable; Triton's kernels lie below it, too


def ready(config: Config) -> None:
    """Import the compiler, and have it make the same code of the same model each time. Before anything is compiled."""
    keep_code(config.data)
    from torch._inductor import config as inductor

    # Torch's deterministic mode keeps this on. Where that is off (on CPUs, with reduce=fast), torch clears this
    # after the first graph; on CPUs no choice of its compiler depends on it.
    inductor.deterministic = True
    # Of headers for CPUs it keeps what is compiled in /tmp/torchinductor_USER, whatever FOLDER says.
    inductor.cpp_cache_precompile_headers = False
    if config.reduce == "exact":
        keep_embedding_backward()


def keep_embedding_backward() -> None:
    """Have torch's compiler leave the backward of embeddings to torch's own kernel.

    On a CPU with several threads, the compiler's adds up in another order each time. On a GPU, in deterministic mode,
    it adds up the gradients of equal tokens one by one (pytorch#41162): slow for a vocabulary of characters.
    """
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import make_fallback

    backward = torch.ops.aten.embedding_dense_backward.default
    decompositions.pop(backward, None)
    make_fallback(backward, warn=False)  # where CI is set, torch itself would refuse that
    torch.compiler.config.cache_key_tag = "mingpt: embeddings"  # torch's caches on disk know nothing of that table


def keep_code(data: Data) -> None:
    """Have torch keep what it compiles below the data's cache, where the next attempt on this machine finds it.

    Unless the user has named a folder (FOLDER). torch runs whatever lies there, and its own choice,
    /tmp/torchinductor_USER, anybody can have made before: ours belongs to this user alone, or else it is a new one,
    for this process only. Each machine has its own, should they share a disk: code for one CPU may not suit another.
    """
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # slow to import

    if os.environ.get(FOLDER, own := default_cache_dir()) != own:  # torch itself sets it where it is not set
        return
    users = Path(getattr(data, "cache_dir", CACHE_DIR)).expanduser() / f"compiled-{os.getuid()}"
    try:
        problem = None if own_folder(users) else "not a folder of this user's alone"
    except OSError as error:
        problem = error.strerror
    if problem and not Env.read().local_rank:
        say(
            f"train.compile=true: {users}: {problem}: what is compiled is not kept for the next start: remove that, or "
            f"set data.cache_dir or {FOLDER} to another place"
        )
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="mingpt-compiled-") if problem else str(users / platform.node())
