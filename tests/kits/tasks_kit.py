"""Tasks of lm-eval of two kinds of request, small and local: nothing is fetched for them."""

import json
import random
from pathlib import Path

WORDS = ["the", "king", "is", "dead", "long", "live", "queen", "and", "all", "her", "men", "O", "woe", "thou", "art"]
CHOICE = """
task: kit_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: kit_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def write_tasks(folder: Path) -> Path:
    """A folder of these tasks. Some answers differ in their last token only."""
    chooser = random.Random(3)
    folder.mkdir(parents=True)
    rows = [
        {
            "question": " ".join(chooser.choices(WORDS, k=chooser.randint(0, 9) if i else 20)),
            "choices": [" the", " to", *(" " + " ".join(chooser.choices(WORDS, k=k)) for k in (1, 2))],
            "gold": i % 4,
            "page": " ".join(chooser.choices(WORDS, k=25)) if i < 3 else "",
        }
        for i in range(11)
    ]
    for name, these in (("questions", rows), ("pages", rows[:3])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in these))
    for text in (CHOICE, ROLLING):
        of = folder / ("pages.jsonl" if text is ROLLING else "questions.jsonl")
        name, options = text.split()[1], {"data_files": {"test": str(of)}, "cache_dir": f"{folder}/cache"}
        data = f"dataset_path: json\ntest_split: test\nfewshot_split: test\ndataset_kwargs: {json.dumps(options)}\n"
        (folder / f"{name}.yaml").write_text(text + data)
    return folder
