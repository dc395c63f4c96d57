"""The table of bad inputs that test_bad_input.py plays: name, what must be named, the cure, overrides, spoils."""

from bad_data_kit import data_set, flipped, missing, truncated, vocabulary
from bad_input_kit import (
    BOTH,
    NOTHING,
    OPEN,
    STRICT,
    Case,
    as_anybody,
    endless,
    env,
    fields,
    fifo,
    file,
    folder,
    link,
    manifest,
    mode,
    mounted,
    moved_out,
    nobody,
    options,
    piped,
    renamed_part,
    s3,
    snapshots,
    text,
    ulimit,
    with_port,
)

# fmt: off
TRAIN, LAUNCH = ("train",), ("launch",)
HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
SECOND = HAND | {"RANK": "1"}
SHORT = ("world.init_timeout_seconds=2", "world.timeout_seconds=20")

# Mistakes in the config: found by each process before anything else, and by the launcher before it starts workers.
CONFIG = [
    Case("unknown key", r"modle\.n_head is not a key", r"did you mean model\.n_head", ("modle.n_head=2",)),
    Case("wrong type", r"model\.n_layer='abc'", "must be a valid integer", ("model.n_layer=abc",)),
    Case("out of range", r"train\.max_steps=0", "must be greater than or equal to 1", ("train.max_steps=0",)),
    Case("not one of the words", "reduce=exat is not one of", r"did you mean exact", ("reduce=exat",)),
    Case("no such option of a group", "there is no model 'gpt3'", "there are .*gpt2", ("model=gpt3",)),
    Case("impossible combination", r"model\.n_head=5 does not divide", "choose a divisor", ("model.n_head=5",)),
    Case("no override", "'train' is not an override", "write key=value", ("train",)),
    Case("no such program option", "unrecognized arguments: --help-me", "see --help", ("--help-me",)),
    Case("five mistakes at once", r"5 problems:", r"(?s)there are.*did you mean.*choose a divisor.*the nearest are",
         ("modle.n_head=1", "schedule=cos", "model.n_head=5", "batch.global_size=17", "seed=-1"),
         also=(r"modle\.n_head is not a key", r"seed=-1", r"schedule 'cos'")),
    Case("absurd number", r"model\.n_embd=1000000000000000000000", "must be at most 2147483647",
         ("model.n_embd=1000000000000000000000",)),
    Case("more processes than microbatches", r"2 processes, but only 1 microbatch", "start at most 1 process",
         ("batch.global_size=2",), (env(**HAND | {"MASTER_PORT": "29500"}),), forms=TRAIN),
    Case("more processes than microbatches, launched", r"2 processes, but only 1 microbatch",
         "start at most 1 process", ("batch.global_size=2",), forms=LAUNCH),
]

# What only the launcher takes.
OPTIONS = [
    Case("nnodes no number", "--nnodes=two", "MIN:MAX", (), (options("--nnodes=two"),), forms=LAUNCH),
    Case("nproc zero", "--nproc-per-node=0", "a number from 1", (), (options("--nproc-per-node=0"),), forms=LAUNCH),
    Case("unknown rendezvous", "--rdzv-backend", "choose from", (), (options("--rdzv-backend=etcd"),), forms=LAUNCH),
    Case("two nodes without an endpoint", "--nnodes=2", "needs --rdzv-endpoint=HOST:PORT", (),
         (options("--nnodes=2"),), forms=LAUNCH),
    Case("static without rank and address", "2 problems", "(?s)needs --master-addr.*needs --node-rank", (),
         (options("--nnodes=2", "--rdzv-backend=static"),), forms=LAUNCH),
    Case("no such port", "--master-port=70000", "to 65535", (),
         (options("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=70000"),), forms=LAUNCH),
    Case("no such endpoint port", "--rdzv-endpoint=127.0.0.1:99999", "to 65535", (),
         (options("--nnodes=2", "--rdzv-endpoint=127.0.0.1:99999"),), forms=LAUNCH),
    Case("no such host", "--rdzv-endpoint=nowhere.invalid", "an address that this node can reach", (),
         (options("--nnodes=2", "--rdzv-endpoint=nowhere.invalid:29500"),), forms=LAUNCH),
    Case("node rank beyond the nodes", "--node-rank=2", "from 0 to 1", (),
         (options("--nnodes=2", "--node-rank=2", "--master-addr=127.0.0.1"),), forms=LAUNCH),
    Case("SkyPilot contradicts itself", "SKYPILOT_NUM_NODES=3", "SKYPILOT_NODE_IPS has fewer addresses", (), (env(
        SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2", SKYPILOT_NODE_RANK="0", SKYPILOT_NUM_NODES="3"),), forms=LAUNCH),
    Case("SkyPilot rank missing", "SKYPILOT_NODE_RANK", "set", (), (env(SKYPILOT_NODE_IPS="127.0.0.1"),),
         forms=LAUNCH),
    Case("container without its job's name", "are set in the environment, but not SING_JOB_NAME", "set all of them", (),
         (env(SING_RANK="0", SING_WORLD_SIZE="2"),), forms=LAUNCH),
    Case("container beyond the world", "SING_RANK=2, SING_WORLD_SIZE=2", "correct them", (),
         (env(SING_RANK="2", SING_WORLD_SIZE="2", SING_JOB_NAME="j", SING_HOSTNAME_SUFFIX="s", SING_MASTER_ADDR="x"),),
         forms=LAUNCH),
    Case("port in use, static", "--master-port: port \\d+ is in use", "choose another", (), (with_port(busy=True)(
        "--nnodes=2", "--rdzv-backend=static", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port={port}"),),
        forms=LAUNCH),
    Case("port in use, c10d", "--rdzv-endpoint: port \\d+ is in use", "choose another", (), (
        env(SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2", SKYPILOT_NODE_RANK="0"),
        with_port(busy=True)("--rdzv-endpoint=127.0.0.1:{port}"),), forms=LAUNCH),
    # Exit 70: a head that is late is there at the next try.
    Case("head never answers, static", r"world\.init_timeout_seconds", "--rdzv-id right", SHORT, (with_port(
        busy=False)("--nnodes=2", "--rdzv-backend=static", "--node-rank=1", "--master-addr=127.0.0.1",
                    "--master-port={port}"),), code=70, forms=LAUNCH),
    Case("head never answers, c10d", r"world\.init_timeout_seconds", "--rdzv-id right", SHORT, (
        env(SKYPILOT_NODE_IPS="127.0.0.2\n127.0.0.1", SKYPILOT_NODE_RANK="1"),
        with_port(busy=False)("--rdzv-endpoint=127.0.0.1:{port}"),), code=70, forms=LAUNCH),
    Case("something else listens at the endpoint", r"world\.init_timeout_seconds", "--rdzv-id right", SHORT, (
        with_port(busy=True)("--nnodes=2", "--rdzv-endpoint=127.0.0.1:{port}"),), code=70, forms=LAUNCH),
    Case("something else listens, static", r"world\.init_timeout_seconds", "--rdzv-id right", SHORT, (with_port(
        busy=True)("--nnodes=2", "--rdzv-backend=static", "--node-rank=1", "--master-addr=127.0.0.1",
                   "--master-port={port}"),), code=70, forms=LAUNCH),
    Case("the other node never comes", r"world\.init_timeout_seconds", "are all up", SHORT, (with_port(
        busy=False)("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port={port}"),),
        code=70, forms=LAUNCH),
]

# torchrun's variables, set by hand. (mingpt.launch sets them itself.)
BY_HAND = [
    Case("rank without address", "RANK is set in the environment, but not MASTER_ADDR, MASTER_PORT", "set all", (),
         (env(RANK="0", WORLD_SIZE="2"),), forms=TRAIN),
    Case("empty address", "RANK is set in the environment, but not MASTER_ADDR:", "set all", (),
         (env(**HAND | {"MASTER_ADDR": ""}),), forms=TRAIN),
    Case("world size without rank", "WORLD_SIZE=2 in the environment announces several", "with `mingpt launch`", (),
         (env(WORLD_SIZE="2"),), forms=TRAIN),
    Case("world size no number", "WORLD_SIZE=two", "a number", (), (env(**HAND | {"WORLD_SIZE": "two"}),), forms=TRAIN),
    Case("rank beyond the world", "RANK=2", "0 to 1", (), (env(**HAND | {"RANK": "2"}),), forms=TRAIN),
    Case("port beyond all", "MASTER_PORT=99999", "1 to 65535", (), (env(**HAND | {"MASTER_PORT": "99999"}),),
         forms=TRAIN),
    Case("port in use, by hand", r"MASTER_PORT=\d+ is in use", "choose another", SHORT,
         (with_port(HAND, busy=True)(),), forms=TRAIN),
    Case("head never answers, by hand", r"MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+ within 2 s", "is that machine up",
         SHORT, (with_port(SECOND, busy=False)(),), code=70, forms=TRAIN),
    Case("something else answers, by hand", r"MASTER_PORT=\d+", "is that machine up", SHORT,
         (with_port(SECOND, busy=True)(),), code=70, forms=TRAIN),
    Case("the other never comes, by hand", r"world\.init_timeout_seconds", "look for the one", SHORT,
         (with_port(HAND, busy=False)(),), code=70, forms=TRAIN),
]

# One of each kind under the launcher too, or the file would take too long: what differs there is how it is told, once.
TEXT = r"data\.path=\S*text\.txt: "
DATA = [
    Case("no text", TEXT + "there is no such", "check the spelling", (), (lambda s: s.text.unlink(),), workers=True),
    Case("unreadable text", TEXT + "permission denied", "check it", (), (mode("text.txt", 0), as_anybody),
         workers=True),
    Case("empty text", TEXT + "the file is empty", "name another", (), (text(b""),), forms=TRAIN),
    Case("not UTF-8", TEXT + "not UTF-8 at byte 3", r"use data\.tokens=byte", (), (text(b"abc\xff" * 999),),
         workers=True),
    Case("one character", TEXT + "only one character, 'a'", "name another", (), (text(b"a" * 9999),), forms=TRAIN),
    Case("a folder for a text", r"data\.path=\S*text\.json: a folder", "name one text file",
         ("data.path={dir}/text.json",), (folder("text.json"),), forms=TRAIN),
    Case("a pipe for a text", r"data\.path=\S*pipe: ", "name one text file", ("data.path={dir}/pipe",), (fifo("pipe"),),
         workers=True),
    Case("a link to itself for a text", r"data\.path=\S*loop: ", "choose another", ("data.path={dir}/loop",),
         (link("loop", "loop"),), forms=TRAIN),
    Case("text shorter than a block", r"model\.block_size=16 is longer", r"lower model\.block_size", (),
         (text(b"to be or not"),), forms=TRAIN),
    Case("no validation remains", r"data\.val_fraction=0\.001", "raise it", ("data.val_fraction=0.001",),
         (text(b"to be or not to be, that is the question"),), workers=True),
    Case("unknown scheme", "data.path=foo://x", "use a local path, s3://", ("data.path=foo://x",), forms=TRAIN),
    Case("cache unwritable", r"data\.cache_dir=\S*shut", "check it",
         ("data.cache_dir={dir}/shut/cache",), (folder("shut", 0o500), as_anybody), forms=TRAIN),
    Case("cache below a file", r"data\.cache_dir=\S*text.txt", "choose another", ("data.cache_dir={dir}/text.txt",),
         forms=TRAIN),
    Case("cache's disk full", r"data\.cache_dir=\S*small: \S+ GB are needed", "choose a folder on a larger",
         ("data.cache_dir={dir}/small",), (text(b"to be or not" * 9999), mounted("small", "size=8k")), workers=True),
    Case("cache read-only", r"data\.cache_dir=\S*small: Read-only", "choose another",
         ("data.cache_dir={dir}/small",), (mounted("small", "ro"),), forms=TRAIN),
]

RUN = [
    Case("run.dir a file", r"(snapshot|run)\.dir=\S*text.txt", "choose another", ("run.dir={dir}/text.txt",),
         workers=True),
    Case("run.dir unwritable", r"run\.dir=\S*shut", "check it", ("run.dir={dir}/shut/run",),
         (folder("shut", 0o500), as_anybody), forms=TRAIN),
    Case("run.dir read-only", r"run\.dir=\S*small: Read-only", "choose another", ("run.dir={dir}/small",),
         (mounted("small", "ro"),), forms=TRAIN),
    Case("run.dir in /proc", r"run\.dir=/proc/none: ", "choose another place", ("run.dir=/proc/none",), forms=TRAIN),
    Case("run.dir of an unknown scheme", r"dir=foo://x", "use a local path, s3://", ("run.dir=foo://x",),
         forms=TRAIN),
    Case("snapshots' disk full", r"snapshot\.dir=\S*small: the disk is full", "free some space",
         ("snapshot.dir={dir}/small", "snapshot.every_steps=0"), (mounted("small", "size=32k"),), workers=True,
         also=("snapshot of step 6",)),
]

# What is wrong with a model of one's own is found before workers start, as far as importing it tells.
MODELS = [
    Case("no such module", r"model\._target_=nowhere\.Model: there is no module 'nowhere'", "check the spelling",
         ("model=own", "model._target_=nowhere.Model"), forms=BOTH),
    Case("an argument is missing", r"model\._target_=torch\.nn\.functional\.relu takes", r"model\.input is missing",
         ("model=own", "model._target_=torch.nn.functional.relu"), forms=TRAIN),
    Case("a GPT's keys for another module", r"model\._target_=torch\.nn\.Linear takes \(in_features",
         r"model\.n_layer is no argument of it",
         ("model=own", "model._target_=torch.nn.Linear", "model.in_features=3", "model.out_features=3"), forms=TRAIN),
    Case("no weights there", r"model\.init_from=\S*nowhere: there is no config\.json", "give a folder",
         ("model.init_from={dir}/nowhere",), workers=True),
    Case("weights of another architecture", r"model\.init_from=\S*llama: weights of another architecture",
         "take those of a GPT-2", ("model.init_from={dir}/llama",), (folder("llama"), file("llama/config.json",
         b'{"model_type": "llama"}')), forms=TRAIN),
    Case("weights of other sizes", r"the weights have n_layer 12, the model has n_layer 2", r"set model\.n_layer=12",
         ("model.init_from={dir}/gpt2",), (folder("gpt2"), file("gpt2/config.json", b'{"model_type": "gpt2"}')),
         forms=TRAIN),
    Case("nothing to freeze", r"train\.freeze: 'wte' matches no parameter", r"there are transformer\.wte\.weight",
         ("train.freeze=[wte]",), workers=True),
]

SET = ("data.kind=shards", "data.path={dir}/set")
TOKENS = [
    Case("unknown kind of data", "data.kind=shard is not one of text, .*shards", "did you mean shards",
         ("data.kind=shard",)),
    Case("key of another kind", "data.tokens is not a key of data.kind=shards", "leave it out",
         (*SET, "data.tokens=char")),
    Case("bpe without a vocabulary", "data.tokens=bpe needs a vocabulary", r"set data\.tokenizer",
         ("data.tokens=bpe",)),
    Case("no vocabulary there", r"data\.tokenizer=\S*/none: there is no such file", "check the spelling",
         ("data.tokens=bpe", "data.tokenizer={dir}/none"), forms=TRAIN),
    Case("vocabulary of two halves", r"data\.tokenizer=\S*/gpt2: the two files", "take both from one place",
         ("data.tokens=bpe", "data.tokenizer={dir}/gpt2"), (vocabulary,), forms=TRAIN),
    Case("no data set there", r"data\.path=\S*/set: no data set is there", "give the folder", SET, workers=True),
    Case("flipped bit in a shard", r"train-00001\.bin does not have the checksum", "copy it again", SET,
         (data_set(flipped),), workers=True),
    Case("truncated shard", r"train-00001\.bin has 77 bytes in place of 2000", "copy it again", SET,
         (data_set(truncated),), forms=TRAIN),
    Case("missing shard", r"data\.path=\S*/set: train-00001\.bin is missing", "copy it again", SET,
         (data_set(missing),), forms=TRAIN),
]

SNAPSHOTS = [
    Case("vocabulary of another text", "snapshot of step 4 in .* another vocabulary", r"take another run\.dir", (),
         (snapshots, text(b"hello, world" * 99)), workers=True),
    Case("another model", r"snapshot of step 4 in .* \(model\.n_layer: 2 -> 3\)", r"take another run\.dir",
         ("model.n_layer=3",), (snapshots,), forms=TRAIN),
    Case("other format", r"snapshot\.dir=\S*: the snapshot of step 4 has format 4",
         r"use the version that wrote it, or another run\.dir", (),
         (snapshots, fields(lambda f: f | {"format": 4, "new": 1})), workers=True),
]

# Damage is no mistake of the user's: the next older snapshot is taken, loudly, and the run goes on to its end.
AND_GOES_ON = "(?s)DAMAGED SNAPSHOT of step 4 .*trying the next older one.*resumed from step 2.*finished: step 6"
DAMAGE = [
    Case(name, "", "", (), (snapshots, damage), code=0, forms=forms, workers=True, also=(says, AND_GOES_ON))
    for name, forms, damage, says in (
        ("manifest truncated", BOTH, manifest(lambda raw: raw[:99]), "manifest.json is not JSON"),
        ("manifest names a path outside", BOTH, fields(lambda f: renamed_part(f, "../../../text.txt")),
         "is not a part's name"),
        ("manifest with an absurd size", TRAIN, fields(lambda f: f | {"parts": {
            k: v | {"size": 10**18} for k, v in f["parts"].items()}}), "does not fit the tensors in it"),
        ("part is a link that leads outside", TRAIN, moved_out, "is a link"),
        ("manifest a pipe", TRAIN, piped, "manifest.json is not a regular file"),
        ("manifest a terabyte long", TRAIN, endless,
         "larger than"),
    )
]


S3 = [
    Case("wrong credentials for the text", r"data\.path=s3://bucket/text.txt: permission denied", "credentials",
         ("data.path=s3://bucket/text.txt",), (s3(STRICT),), forms=TRAIN),
    Case("wrong credentials for the run", r"dir=s3://bucket/run\S*: permission denied", "credentials",
         ("run.dir=s3://bucket/run",), (s3(STRICT),), workers=True),
    Case("no such bucket", r"run\.dir=s3://nowhere/run: there is no such", "check the spelling", ("run.dir=s3://nowhere/run",),
         (s3(OPEN),), forms=TRAIN),
    Case("no credentials", r"dir=s3://bucket/run\S*: permission denied", "credentials", ("run.dir=s3://bucket/run",),
         (s3(OPEN), nobody), forms=TRAIN),
    # Exit 70: a network that is down comes back.
    Case("nothing listens at the endpoint", r"dir=s3://bucket/run", "try again", ("run.dir=s3://bucket/run",),
         (s3(NOTHING),), code=70, workers=True),
    Case("nothing listens where the text is", r"data\.path=s3://bucket/text\.txt", "try again",
         ("data.path=s3://bucket/text.txt",), (s3(NOTHING),), code=70, forms=TRAIN),
]

DEVICE = [
    Case("absent GPU", r"world\.device=cuda: process \d of this node needs a GPU", r"use world\.device=cpu",
         ("world.device=cuda",), (env(CUDA_VISIBLE_DEVICES=""),), workers=True),
    Case("NCCL without a GPU", r"world\.backend=nccl", r"use world\.backend=gloo", ("world.backend=nccl",),
         (env(CUDA_VISIBLE_DEVICES=""),), workers=True),
    Case("model larger than any memory", "out of memory", r"lower batch\.micro_size.*the model's size",
         ("model.n_embd=300000",), workers=True, once=False),
    Case("microbatch larger than the memory", "out of memory", r"lower batch\.micro_size",
         ("batch.micro_size=400000", "batch.global_size=800000", "model.n_layer=1"), (ulimit("-v", 4 * 2**20),),
         forms=TRAIN),
]
# fmt: on

CASES = [*CONFIG, *OPTIONS, *BY_HAND, *DATA, *RUN, *MODELS, *TOKENS, *SNAPSHOTS, *DAMAGE, *S3, *DEVICE]
