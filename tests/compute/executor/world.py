"""Drives a TorchExecutor with hand-made plans, and the same model in transformers to compare with."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import transformers
from torch import Tensor

from deltaserve.compute.collective.collective import ALONE, Collective
from deltaserve.compute.collective.expert_group import ExpertGroup, Partners
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.compute.executor.step_recorder import StepRecorder, recorder_of
from deltaserve.control.sched.plan import (
    ItemResult,
    PageUpdate,
    PlanItem,
    RowOpen,
    SharedRun,
    StepPlan,
    StepResult,
    TokenOf,
    TokenValues,
    WorkList,
)
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.quantization import Quantization
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.tokens import pack_u32
from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.drafts.draft_algorithm import OFF
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.shard_rules import ExpertPlacement
from deltaserve.server.text.text_codec import TextCodec
from tests.compute.thread_ranks import ThreadCollective
from tests.patience import PATIENCE_S

VOCAB_SIZE = 272
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE)
"""Greedy, with the whole distribution as logprobs."""
TOLERANCE = 2e-3


def random_tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(count)]


def grammars_of(path: Path) -> AnswerGrammars:
    """Grammars of a model's answers."""
    return AnswerGrammars(lambda: TextCodec.load(path).vocabulary())


class Driver:
    """Rows on scattered pages; counts steps."""

    state_dtype = DType.FLOAT32
    attention: str = "auto"
    expert_group: ExpertGroup | None = None
    quantization: Quantization = "auto"
    rounding = Rounding.OF_QUERY
    graph_rows: int | None = None
    piece_tokens: int | None = None
    drafts = OFF
    least_likely = 0.0
    """Probability of all guesses at a row below which no further one is made."""

    def __init__(
        self,
        path: Path,
        page_size: int = 16,
        split_tokens: int = 32,
        kv_dtype: DType | None = None,
        num_pages: int | None = None,
        device: str = "cpu",
        dtype: DType | None = None,
    ) -> None:
        spec = self.model(path)
        cache_spec = spec.cache_spec(page_size, kv_dtype or dtype or spec.dtype, self.state_dtype)
        num_pages = num_pages or 1024 // page_size
        pools = (num_pages + 1,) * cache_spec.num_pools
        sizes = ExecutorSizes(pools, max_rows=32, max_context_len=512, attention_backend=self.attention)
        sizes = replace(sizes, quantization=self.quantization, rounding=self.rounding)
        sizes = replace(sizes, graph_rows=self.graph_rows, piece_tokens=self.piece_tokens, recorder=self.recorder)
        sizes = replace(sizes, grammars=grammars_of(path), drafts=self.drafts)

        def load(collective: Collective) -> TorchExecutor:
            partners = Partners(collective, self.expert_group)
            return TorchExecutor.load(path, spec, cache_spec, sizes, device, dtype, partners)

        self.executor = load(ALONE)
        self._load = load
        self.page_size, self.split_tokens = page_size, split_tokens
        self.cache = cache_spec
        self.free = [PageId(page) for page in range(num_pages)]
        random.Random(0).shuffle(self.free)
        self._trap = PageId(num_pages)
        self._spoil(self.executor)
        self.pages: dict[int, tuple[PageId, ...]] = {}
        """Pages of each row, in every pool."""
        self._opens: list[RowOpen] = []
        self._updates: list[PageUpdate] = []
        self.steps = 0

    def model(self, path: Path) -> ModelSpec:
        return load_spec(path)

    def recorder(self, device: torch.device) -> StepRecorder | None:
        return recorder_of(device)

    def open(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        capacity: int = 256,
        prefix_of: int | None = None,
        prefix_len: int = 0,
        prompt_len: int | None = None,
    ) -> None:
        """The row starts with the next step. Its first `prefix_len` positions lie on the pages of `prefix_of`."""
        shared = self.pages[prefix_of][: prefix_len // self.page_size] if prefix_of is not None else ()
        count = -(-capacity // self.page_size) - len(shared)
        pages = shared + tuple(self.free.pop() for _ in range(count))
        self.pages[row] = pages
        self._opens.append(RowOpen(RowId(row), sampling, pack_u32(tokens), prompt_len or len(tokens)))
        self._updates += [PageUpdate(RowId(row), pool, 0, pages) for pool in self._pools]

    def step(
        self, items: Sequence[PlanItem], shared: Sequence[SharedRun] = (), closes: Sequence[int] = ()
    ) -> StepResult:
        return self.run(self.planned(items, shared, closes))

    def planned(
        self, items: Sequence[PlanItem], shared: Sequence[SharedRun] = (), closes: Sequence[int] = ()
    ) -> StepPlan:
        """The next step's plan."""
        plan = StepPlan(
            StepIndex(self.steps),
            tuple(items),
            WorkList(self.split_tokens, tuple(shared)),
            tuple(self._opens),
            (*self._updates, *self._free_behind(items)),
            tuple(RowId(row) for row in closes),
            self.least_likely,
        )
        self._opens, self._updates = [], []
        self.steps += 1
        return plan

    def _spoil(self, executor: TorchExecutor) -> None:
        """Not a number in every dtype."""
        for arena in executor.memory.kv.arenas:
            start = self._trap * arena.page_bytes
            arena.bytes[start : start + arena.page_bytes] = 0xFF

    @property
    def _pools(self) -> tuple[PoolId, ...]:
        return tuple(PoolId(pool) for pool in range(self.cache.num_pools))

    def _free_behind(self, items: Sequence[PlanItem]) -> Iterator[PageUpdate]:
        """What no token to come can see is gone: a page full of NaN stands in its place."""
        for pool in self._pools:
            for item in items:
                first = self.cache.pools[pool].first_needed(item.q_start, self.page_size)
                if first:
                    yield PageUpdate(item.row, pool, 0, (self._trap,) * first)

    def run(self, plan: StepPlan) -> StepResult:
        return self.executor.execute(plan)

    def decode(self, row: int, position: int) -> PlanItem:
        """The token drawn by the previous step is the input."""
        return PlanItem(RowId(row), position, 1, TokenOf(StepIndex(self.steps - 1)), True)


class RankDriver(Driver):
    """Driver of several ranks of one worker, each in a thread of its own."""

    def __init__(
        self,
        path: Path,
        tp_size: int,
        page_size: int = 16,
        dtype: DType | None = None,
        placement: ExpertPlacement = ExpertPlacement(),
    ) -> None:
        self._placement = placement
        Driver.__init__(self, path, page_size, dtype=dtype)
        self.ranks = [self._load(collective) for collective in ThreadCollective.group(tp_size, PATIENCE_S)]
        for rank in self.ranks:
            self._spoil(rank)
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        self._drawn: dict[RowId, int] = {}

    def model(self, path: Path) -> ModelSpec:
        return load_spec(path).placed(self._placement)

    def run(self, plan: StepPlan) -> StepResult:
        """The first rank's result. Input tokens reach all ranks by value; the others draw none."""
        plan = replace(plan, items=tuple(self._by_value(item) for item in plan.items))
        steps = [thread.submit(rank.execute, plan) for thread, rank in zip(self._threads, self.ranks, strict=True)]
        wait(steps)
        first, *others = (step.result() for step in steps)
        assert all(not item.drawn and not item.prompt_logprobs for result in others for item in result.items)
        self._drawn |= {item.row: item.drawn[-1].token for item in first.items if item.drawn}
        return first

    def _by_value(self, item: PlanItem) -> PlanItem:
        if isinstance(item.inputs, TokenValues):
            return item
        return replace(item, inputs=TokenValues(pack_u32([self._drawn[item.row]])))


def extend(row: int, tokens: Sequence[int], start: int, end: int, samples: bool | None = None) -> PlanItem:
    """Positions [start, end) of `tokens`; draws after the last one unless told."""
    draws = end == len(tokens) if samples is None else samples
    return PlanItem(RowId(row), start, end - start, TokenValues(pack_u32(tokens[start:end])), draws, True)


def drawn(result: ItemResult) -> int:
    (sampled,) = result.drawn
    return sampled.token


def distribution(logprobs: TokenLogprobs | None) -> Tensor:
    """[V] from logprobs that list the whole vocabulary."""
    assert logprobs is not None
    values = dict(logprobs.top)
    assert sorted(values) == list(range(len(values)))  # and not one id beside them
    return torch.tensor([values[token] for token in range(len(values))])


def drawn_distribution(result: ItemResult) -> Tensor:
    """[V]"""
    (sampled,) = result.drawn
    return distribution(sampled.logprobs)


_LOADING = Lock()
"""transformers replaces functions of torch while it loads a model: two threads at it leave them replaced, and models
that are loaded later answer wrongly."""


def _reference(path: Path) -> Any:
    with _LOADING:
        return _loaded(path)


@cache
def _loaded(path: Path) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logprobs(path: Path, tokens: Sequence[int]) -> Tensor:
    """[T, V] of transformers, float32: line i is the distribution after token i."""
    logits: Tensor = _reference(path)(torch.tensor([list(tokens)])).logits[0]
    return logits.log_softmax(-1)


def assert_same(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    """No log-probability differs by more than `tolerance`."""
    assert got.shape == want.shape
    worst = (got - want).abs().max().item()
    assert worst <= tolerance, f"logprobs differ by {worst:.2e}"


def check_generation(driver: Driver, path: Path, num_decode: int = 10) -> None:
    """Three packed requests, cut into odd chunks, then decoded together: every position's distribution agrees."""
    prompts = [random_tokens(150, 1), random_tokens(3, 2), random_tokens(77, 3)]
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt)
    schedule = [
        [(0, 0, 37), (1, 0, 3)],
        [(0, 37, 38), (2, 0, 10)],
        [(2, 10, 27), (0, 38, 101)],
        [(0, 101, 150), (2, 27, 77)],
    ]
    prompt_parts: list[list[Tensor]] = [[], [], []]
    outputs: list[list[int]] = [[], [], []]
    drawn_parts: list[list[Tensor]] = [[], [], []]
    for chunks in schedule:
        result = driver.step([extend(row, prompts[row], start, end) for row, start, end in chunks])
        for item in result.items:
            prompt_parts[item.row] += [distribution(logprobs) for logprobs in item.prompt_logprobs]
            if item.drawn:
                outputs[item.row].append(drawn(item))
                drawn_parts[item.row].append(drawn_distribution(item))
    # Row 1 has drawn its first token three steps ago, so decode starts from values.
    first = [PlanItem(RowId(r), len(p), 1, TokenValues(pack_u32(outputs[r])), True) for r, p in enumerate(prompts)]
    for count in range(num_decode):
        items = first if count == 0 else [driver.decode(r, len(p) + count) for r, p in enumerate(prompts)]
        for item in driver.step(items).items:
            outputs[item.row].append(drawn(item))
            drawn_parts[item.row].append(drawn_distribution(item))
    for row, prompt in enumerate(prompts):
        want = reference_logprobs(path, prompt + outputs[row][:-1])
        assert_same(torch.stack(prompt_parts[row]), want[: len(prompt) - 1])
        assert_same(torch.stack(drawn_parts[row]), want[len(prompt) - 1 :])
        assert outputs[row] == want[len(prompt) - 1 :].argmax(-1).tolist()
