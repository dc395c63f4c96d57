"""cli.importing: garbage is collected again afterwards, whatever the import did."""

import gc
from importlib import import_module

import pytest

from mingpt.cli import importing


def test_garbage_is_collected_again_after_imports_that_fail_too() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    with pytest.raises(ImportError), importing():
        import_module("no_such_module")
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
