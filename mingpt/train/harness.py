"""A language model of ours as lm-eval's model: lm-eval's requests, batches and order; our logits.

Imports lm-eval, and so is imported only where tasks are asked for (tasks.py). All processes have the same requests.
Each batch is computed by one of them, whole, and its answers go to all: the same figures for any number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional as F
from tqdm import tqdm

from mingpt.data.vocabulary import TextVocabulary
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.model.sampling import generate_stream
from mingpt.redact import printable, without_secrets
from mingpt.world.world import Progress, World

Words = tuple[str, str]
Request = tuple[Words | None, list[int], list[int]]  # texts, tokens of the context, tokens of the continuation
Row = tuple[list[int], list[list[int]]]  # the model's input, and the continuations that its last logits score
Batch = TypeVar("Batch")
Answer = TypeVar("Answer")

MOST_GENERATED = 256  # tokens, where a task says nothing: as lm-eval's own model
ROUND = 8  # batches of a process between two exchanges of answers: none waits long, for others or for a stop
LENGTHS = {"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}
GENERATION = {"until", "do_sample", "temperature", "top_k", "top_p"} | LENGTHS
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
        self.stop, self._device, self._task_of = stop, world.device, dict[Words, str]()
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
        self._task_of = {request.args: request.task_name for request in requests}
        with self._naming(requests):
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows, counts = list[Request](), list[int]()
        with self._naming(requests):
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
            words = words or ("", "")  # pieces of a long text have none, and always fit
            raise UserError(
                f"task {self._task_of.get(words)}: the answer {words[1][:40]!r} has {len(continuation)} tokens, and "
                f"the model takes 1 to {self.block_size}: leave the task out, or train with a larger model.block_size"
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
        if others := {key for request in requests for key in request.args[1]} - GENERATION:
            raise UserError(f"task {requests[0].task_name}: generates with {', '.join(sorted(others))}: leave it out")
        with self._naming(requests):
            prompts = [
                (self.tok_encode(request.args[0]) or [self.prefix_token_id], request.args[1], number)
                for number, request in enumerate(requests)
            ]
        ordered = Collator(
            prompts, sort_fn=lambda p: (-len(p[0]), p[0]), group_by="gen_kwargs", group_fn=lambda p: p[1]
        )
        return ordered.get_original(self._in_shares(list(ordered.get_batched(n=self.batch_size)), self._generate))

    def _generate(self, batch: list[tuple[list[int], dict[str, Any], int]]) -> list[str]:
        """Each prompt's continuation up to a stop sequence. All prompts of a batch have the same settings."""
        settings = dict(normalize_gen_kwargs(batch[0][1], MOST_GENERATED))
        end = self.eot_token_id
        stops = handle_stop_sequences(settings["until"], eos=None if end is None else self.vocabulary.decode([end]))
        count = settings["max_gen_toks"]
        # As lm-eval: what is generated has room in the block. If that is as large as the block, the window slides.
        room = self.block_size - count if self.block_size > count else self.block_size
        prompts = [tokens[-room:] for tokens, _, _ in batch]
        longest = max(map(len, prompts))
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=self.world.device)
        texts, written = [""] * len(prompts), [list[int]() for _ in prompts]
        with self.autocast:
            stream = generate_stream(
                self.model,
                padded,
                count,
                lengths=[len(p) for p in prompts],
                temperature=settings.get("temperature", 0.0),  # 0 unless the task samples
                top_k=settings.get("top_k"),
                top_p=settings.get("top_p"),
                numbers=[number for _, _, number in batch],
            )
            for position, column in enumerate(stream, min(map(len, prompts))):
                for i, token in enumerate(column.tolist()):
                    if len(prompts[i]) <= position < len(prompts[i]) + count:
                        written[i].append(token)
                        texts[i] = self.vocabulary.decode(written[i])
                Progress.microbatches += 1
                if all(any(stop and stop in text for stop in stops) for text in texts):
                    break
        return [postprocess_generated_text(text, stops, None) for text in texts]

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

    @contextmanager
    def _naming(self, requests: list[Instance]) -> Iterator[None]:
        """Name the task whose text the vocabulary cannot spell."""
        try:
            yield
        except UserError as error:
            for request in requests:
                try:
                    self.tok_encode("".join(text for text in request.args if isinstance(text, str)))
                except UserError as problem:
                    raise UserError(f"task {request.task_name}: {problem}") from error
            raise
