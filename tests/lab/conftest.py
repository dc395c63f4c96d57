"""Bare machines and the image are tested beside the lab, in a second process: `make test-lab` runs pytest with -n 2."""

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

BESIDE = ("test_bare.py", "test_image.py")  # all others share six nodes


class TwoGroups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "beside" if nodeid.partition("::")[0].endswith(BESIDE) else "lab"


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoGroups:
    """Not by xdist_group marks: xdist 3.8 does not see them with pytest 9.2 (both tests of a group ran at once)."""
    return TwoGroups(config, log)
