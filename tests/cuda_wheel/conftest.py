"""These tests need torch's CUDA wheel, which `make test-cuda-wheel` installs in an environment of its own."""

import torch

collect_ignore_glob = [] if torch.version.cuda else ["test_*.py"]
