"""The torch Executor: applies a StepPlan to rows and pages, runs the decoder, draws tokens."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.base.errors import ConfigError, StateError
from deltaserve.base.ids import RowId
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.device.attention_choice import AttentionChoice, make_attention, open_native
from deltaserve.device.element_conversion import torch_dtype
from deltaserve.device.memory_block import Sharing
from deltaserve.device.page_memory import DeviceMemory
from deltaserve.device.page_table import PageTable
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import CacheSpec
from deltaserve.models.collective import ALONE, Collective
from deltaserve.models.decoder import Decoder, LastTokens
from deltaserve.models.loader import load_weights
from deltaserve.models.model_spec import ModelSpec
from deltaserve.models.native_ops import make_step_ops
from deltaserve.native.native_library import NativeContext
from deltaserve.runner.inputs import StepInputs, step_inputs
from deltaserve.runner.row_state import Row
from deltaserve.runner.sampler import SampleRow, finite_rows, sample, token_logprobs
from deltaserve.runner.scratch import LOGPROB_POSITIONS
from deltaserve.sched.plan import ItemOutcome, ItemResult, PlanItem, Sampled, StepPlan, StepResult, TokenValues

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorSizes:
    """What an executor takes of its machine."""

    num_pages: tuple[int, ...]
    """Per pool of the CacheSpec."""
    max_rows: int
    """Row ids are 0 .. max_rows - 1."""
    max_context_len: int
    num_threads: int = 1
    """Of this process's torch, and of the native library."""
    attention_backend: AttentionChoice = "auto"
    sharing: Sharing = Sharing.PRIVATE
    """Of the pages."""


class TorchExecutor:
    """One rank's Executor. Called from one thread; `memory` may be used from another.

    All ranks of a worker execute the same plans. The first one draws the tokens; the results of the others hold none,
    and plans give them every input token by value. Which collectives a step makes follows from its plan alone.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheSpec,
        sizes: ExecutorSizes,
        device: torch.device,
        native: NativeContext | None,
    ) -> None:
        """`native` None: attention by torch. Raises ConfigError where it cannot be had as `sizes` ask for it."""
        self._shard = decoder.shard
        self.memory = DeviceMemory(cache, sizes.num_pages, device, self._shard, sizes.sharing)
        self._tables = PageTable(cache.num_pools, sizes.max_rows, cache.num_pages(sizes.max_context_len))
        self._attention = make_attention(
            sizes.attention_backend, native, self.memory.kv, self._tables, decoder.local.num_heads
        )
        self._decoder = decoder
        self._device = device
        self._max_context_len = sizes.max_context_len
        self._rows: dict[RowId, Row] = {}

    @classmethod
    def load(
        cls,
        model_path: Path,
        spec: ModelSpec,
        cache: CacheSpec,
        sizes: ExecutorSizes,
        device: str = "cpu",
        dtype: DType | None = None,
        collective: Collective = ALONE,
    ) -> "TorchExecutor":
        """Read the weights, allocate the pools. `spec`, `cache`: of the whole model. `dtype` None: the checkpoint's.

        Raises ConfigError for a folder or device that cannot be used.
        """
        torch.set_num_threads(sizes.num_threads)
        where = torch.device(device)
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {device} asked for, but torch sees no CUDA device")
        weights = load_weights(model_path, spec, torch_dtype(dtype or spec.dtype), where, collective.shard)
        native = open_native(sizes.attention_backend, where, sizes.num_threads)
        ops = make_step_ops(native, weights.embedding.dtype)
        return cls(Decoder(spec, weights, ops, collective), cache, sizes, where, native)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """See sched/executor.py."""
        start = time.perf_counter()
        self._apply(plan)
        result = StepResult(plan.step, ())
        if plan.items:
            self._check_inputs(plan)
            inputs = step_inputs(plan, self._rows)
            result = self._compute_or_fail(plan, inputs) if self._shard.size == 1 else self._compute(plan, inputs)
        return replace(result, seconds=time.perf_counter() - start)

    def _check_inputs(self, plan: StepPlan) -> None:
        if self._shard.rank and not all(isinstance(item.inputs, TokenValues) for item in plan.items):
            raise StateError(f"rank {self._shard.rank} draws no tokens, but step {plan.step} asks for one that it drew")

    def _compute_or_fail(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        """Raises only when the device does not answer any more.

        Only of a worker with one rank: where one of several fails, the others wait for it in a collective, and the
        worker ends.
        """
        try:
            return self._compute(plan, inputs)
        except Exception:
            _log.exception("step %d of %d tokens failed: its requests end", plan.step, plan.num_tokens)
        # Outside of the handler: the exception held the tensors of the step.
        self._attention.free_scratch()
        self._wait_for_device()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        failed = tuple(ItemResult(item.row, outcome=ItemOutcome.FAILED) for item in plan.items)
        return StepResult(plan.step, failed)

    def _wait_for_device(self) -> None:
        """CUDA computes beside the host, on one stream; pages are read by other threads and streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _compute(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        vocab_size = self._decoder.spec.vocab_size
        if inputs.tokens.min() < 0 or inputs.tokens.max() >= vocab_size:  # a table that is divided has no line for it
            raise StateError(f"step {plan.step} has a token outside of 0..{vocab_size - 1}")
        attention, states = self._attention.begin_step(inputs.batch), self._attention.begin_states(inputs.batch)
        tokens, positions = self._tensor(inputs.tokens), self._tensor(inputs.positions)
        last = self._last_tokens(inputs)
        hidden = self._decoder.forward(tokens, positions, attention, last, states)  # [N, hidden]
        result = StepResult(
            step=plan.step,
            items=self._results(plan, inputs, hidden),
            tokens_read=inputs.batch.tokens_read,
            shared_tokens_read=self._attention.shared_tokens_read(inputs.batch),
        )
        self._wait_for_device()
        return result

    def _last_tokens(self, inputs: StepInputs) -> LastTokens | None:
        """None: those of the step."""
        wanted = inputs.wanted
        if len(wanted.tokens) == inputs.batch.num_tokens:
            return None
        attention = self._attention.begin_step(wanted.batch) if wanted.batch.queries else ()
        return LastTokens(self._tensor(wanted.tokens), attention)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.closes:
            del self._rows[row]
        for opened in plan.opens:
            self._rows[opened.row] = Row(opened, self._max_context_len, self._decoder.spec.vocab_size)
        for update in plan.pages:
            self._tables.write(update.pool, update.row, update.first_index, update.pages)

    def _results(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> tuple[ItemResult, ...]:
        """hidden [N, hidden] of the wanted tokens"""
        results = {item.row: ItemResult(item.row) for item in plan.items}
        for item, end in zip(plan.items, inputs.wanted.ends, strict=True):
            if item.wants_prompt_logprobs:
                results[item.row] = self._prompt_logprobs(item, hidden[end - item.q_len : end])
        sampling = [(item, end) for item, end in zip(plan.items, inputs.wanted.ends, strict=True) if item.samples]
        if sampling:
            last = hidden.index_select(0, torch.tensor([end - 1 for _, end in sampling], device=self._device))
            logits = self._decoder.logits(last)  # [S, V] float32
            drawing = [item for item, _ in sampling] if self._shard.rank == 0 else []
            for item, sampled in zip(drawing, self._sample(plan, drawing, logits), strict=True):
                outcome = results[item.row].outcome if sampled is not None else ItemOutcome.NOT_FINITE
                results[item.row] = ItemResult(item.row, sampled, outcome, results[item.row].prompt_logprobs)
        return tuple(results[item.row] for item in plan.items)

    def _sample(self, plan: StepPlan, items: Sequence[PlanItem], logits: Tensor) -> list[Sampled | None]:
        """logits [S, V] of each item's last position. None where they are not finite."""
        results: list[Sampled | None] = [None] * len(items)
        good = [index for index, ok in enumerate(finite_rows(logits)) if ok] if items else []
        if not good:
            return results
        lines = logits if len(good) == len(items) else logits[good]
        for index, draw in zip(good, sample(lines, [self._sample_row(items[i]) for i in good]), strict=True):
            item = items[index]
            self._rows[item.row].draw(plan.step, item.q_start + item.q_len, draw.token)
            results[index] = Sampled(draw.token, draw.logprobs)
        return results

    def _sample_row(self, item: PlanItem) -> SampleRow:
        row = self._rows[item.row]
        history = row.history(self._device) if row.sampling.needs_history else None
        return SampleRow(row.sampling, item.q_start + item.q_len - row.prompt_len, history)

    def _prompt_logprobs(self, item: PlanItem, hidden: Tensor) -> ItemResult:
        """hidden [q_len, hidden]: position i predicts the token at i + 1, where that is known."""
        row = self._rows[item.row]
        targets = row.tokens(item.q_start + 1, item.q_start + item.q_len + 1)
        num_top = row.sampling.prompt_logprobs or 0
        out: list[TokenLogprobs] = []
        is_finite = True
        for start in range(0, item.q_len, LOGPROB_POSITIONS):  # all of them, whatever the logits are: ranks gather them
            logits = self._decoder.logits(hidden[start : start + LOGPROB_POSITIONS])
            piece = self._tensor(targets[start : start + LOGPROB_POSITIONS].copy())
            is_finite = is_finite and all(finite_rows(logits[: len(piece)]))
            if is_finite and self._shard.rank == 0:
                out += token_logprobs(logits[: len(piece)], piece, num_top)
        if not is_finite:
            return ItemResult(item.row, outcome=ItemOutcome.NOT_FINITE)
        return ItemResult(item.row, prompt_logprobs=tuple(out))

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
