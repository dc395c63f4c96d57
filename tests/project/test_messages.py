"""tests/messages.txt, in which the wording of messages stands."""

import re

from tests.kits.paths_kit import ROOT
from tests.kits.told import entries


def test_each_message_belongs_to_a_test_that_exists() -> None:
    for name in entries():
        file, _, test = name.partition("::")
        function = re.split(r"\W", test)[0]
        assert f"def {function}(" in (ROOT / file).read_text(), f"{name}: delete it from tests/messages.txt"
