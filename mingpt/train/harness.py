"""A language model of ours as lm-eval's model: lm-eval's requests, batches and order; our logits.

Imports lm-eval, and so is imported only where tasks are asked for (tasks.py). All processes have the same requests.
Each batch is computed by one of them, whole, and its answers go to all: the same figures for any number of processes.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional as F
from tqdm import tqdm

from mingpt.data.vocabulary import TextVocabulary
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.redact import printable, without_secrets
from mingpt.world.world import Progress, World

Words = tuple[str, str]
Request = tuple[Words | None, list[int], list[int]]  # texts, tokens of the context, tokens of the continuation
Row = tuple[list[int], list[list[int]]]  # the model's input, and the continuations that its last logits score
Batch = TypeVar("Batch")
Answer = TypeVar("Answer")

ROUND = 8  # batches of a process between two exchanges of answers: none waits long, for others or for a stop
BEGINNINGS = ("\n", " ")  # what stands before a text if the vocabulary has no end of text


class Stopped(Exception):
    """A process is asked to stop: none of them goes on measuring."""


class NotMeasured(Exception):
    """Something is wrong with a task: all processes have been told, and none of them goes on measuring."""


class Harness(TemplateLM):
    """model: in evaluation mode, on world.device. batch_size: rows that are computed at a time.

    progress: draw a bar, if this is rank 0 and stderr a terminal. stop: whether this process is asked to stop.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: TextVocabulary,
        world: World,
        autocast: Any,
        batch_size: int,
        progress: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.model, self.vocabulary, self.world, self.autocast = model, vocabulary, world, autocast
        self.batch_size, self.block_size, self.progress = batch_size, model.config.block_size, progress
        self.stop, self._device = stop, world.device
        self._exchanging = False

    @property
    def eot_token_id(self) -> int | None:
        """The end of a text; None: the vocabulary has none."""
        try:
            return getattr(self.vocabulary, "end_of_text", None)
        except UserError:  # a tokenizer.json without one
            return None

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text: the end of the text before, else the end of the line before, else a space."""
        if (end := self.eot_token_id) is not None:
            return end
        for text in BEGINNINGS:
            try:
                return self.vocabulary.encode(text)[0]
            except UserError:
                continue
        raise UserError("the vocabulary has no end of text, no line feed and no space to stand before a text")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return self.vocabulary.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows, counts = list[Request](), list[int]()
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.block_size, context_len=1)
            found: list[Request] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            counts.append(len(found))
        answers = iter(self._loglikelihood_tokens(windows))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(self, requests: list[Request], **options: Any) -> list[tuple[float, bool]]:
        ordered = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1] + request[2]), tuple(request[1] + request[2])),
            group_by="contexts",  # continuations that differ in their last token only are scored by one row
            group_fn=lambda request: request[1] + request[2][:-1],
        )
        batches = [[self._row(ordered, *row) for row in batch] for batch in ordered.get_batched(n=self.batch_size)]
        return ordered.get_original([(total, greedy) for total, greedy in self._in_shares(batches, self._score)])

    def _row(self, ordered: Collator, words: Words | None, context: list[int], continuation: list[int]) -> Row:
        """The model's input, cut at its left to the block, and all continuations that it scores."""
        if not 0 < len(continuation) <= self.block_size:
            _, answer = words or ("", "")  # pieces of a long text have none, and always fit
            raise UserError(
                f"the answer {answer[:40]!r} has {len(continuation)} tokens, and the model takes 1 to "
                f"{self.block_size}: leave its task out, or train with a larger model.block_size"
            )
        # The Collator notes the order in which answers will come; logits it only hands on.
        scored = ordered.get_cache(words, context, continuation, torch.empty(1, 1, 1))
        return (context + continuation)[-(self.block_size + 1) : -1], [list(tokens) for _, tokens, _ in scored]

    def _score(self, batch: list[Row]) -> list[tuple[float, bool]]:
        """For each continuation: the sum of its tokens' log-probabilities, and whether each token is the likeliest."""
        longest = max(len(inputs) for inputs, _ in batch)
        padded = [inputs + [0] * (longest - len(inputs)) for inputs, _ in batch]
        with self.autocast:
            logits = self.model.logits(torch.tensor(padded, device=self.world.device)).float()
        answers = list[torch.Tensor]()
        for (inputs, continuations), of_row in zip(batch, logits, strict=True):
            for continuation in continuations:
                targets = torch.tensor(continuation, device=self.world.device)
                scores = of_row[len(inputs) - len(continuation) : len(inputs)]
                chosen = F.log_softmax(scores, -1).gather(1, targets[:, None]).sum()
                answers.append(torch.stack([chosen.double(), (scores.argmax(-1) == targets).all().double()]))
        return [(total, greedy == 1) for total, greedy in torch.stack(answers).tolist()]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        raise NotImplementedError("load_tasks refuses tasks that generate")

    def _exchange(self, value: Any, problem: str | None = None) -> list[Any]:
        """Every process's value, by rank. Raises NotMeasured in all processes if one of them has a problem instead."""
        self._exchanging = True
        heard = self.world.gather([problem, value])
        self._exchanging = False
        if problems := [said for said, _ in heard if said]:
            raise NotMeasured(problems[0])
        return [value for _, value in heard]

    def together(self, ask: Callable[[], Answer]) -> Answer:
        """What `ask` returns. Collective: if it raises in one process, all raise NotMeasured, and none waits for it.

        The others hear of it in their next exchange: each exchange of `ask` is like the one at its end.
        """
        try:
            answer = ask()
        except (Stopped, NotMeasured):  # in all processes
            raise
        except (Exception, SystemExit) as error:
            if self._exchanging:  # another process is lost: no task is to blame
                raise
            problems = error.problems if isinstance(error, UserError) else str(error).splitlines()[:1]
            named = [] if isinstance(error, UserError) else [type(error).__name__]
            self._exchange(None, printable(str(without_secrets(": ".join([*named, *problems])))))
            raise AssertionError("the exchange raises") from error
        self._exchange(None)
        return answer

    @torch.no_grad()
    def _in_shares(self, batches: list[Batch], compute: Callable[[Batch], Sequence[Any]]) -> list[Any]:
        """The answers to all batches, in order, in every process; each batch is computed by one process.

        Raises Stopped in all processes after one of them was asked to stop.
        """
        rank, size = self.world.rank, self.world.size
        requests = sha256(repr(batches).encode(errors="surrogatepass")).hexdigest()
        if len(set(self._exchange(requests))) > 1:
            raise UserError("the processes have different requests: the tasks' data are not the same on all nodes")
        answers = list[Any]()
        with tqdm(total=len(batches), unit="batch", disable=None if self.progress and rank == 0 else True) as bar:
            for start in range(0, len(batches), ROUND * size):
                some, mine = batches[start : start + ROUND * size], list[Sequence[Any]]()
                for batch in some[rank::size]:
                    Progress.microbatches += 1
                    mine.append(compute(batch))
                    bar.update(size)
                gathered, stops = zip(*self._exchange([mine, self.stop()]), strict=True)
                if any(stops):
                    raise Stopped
                for i in range(len(some)):
                    answers += gathered[i % size][i // size]
        return answers
