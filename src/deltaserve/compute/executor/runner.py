"""The torch Executor: applies a StepPlan to rows and pages, runs the decoder, draws tokens."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention_choice import make_attention, open_native
from deltaserve.compute.collective.expert_group import Partners
from deltaserve.compute.executor.grammar_masks import GrammarMasks
from deltaserve.compute.executor.head_passes import LaunchedPasses
from deltaserve.compute.executor.host_draws import HostDraws
from deltaserve.compute.executor.inputs import StepInputs, step_inputs, wants_more
from deltaserve.compute.executor.launched import AtOnce, DrawingItem, DrawsOnHost, Launched, StepClock
from deltaserve.compute.executor.model_drafter import ModelDrafter
from deltaserve.compute.executor.recorded_steps import RecordedSteps, make_recorded_steps
from deltaserve.compute.executor.resident_decode import ResidentDecode
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.step_pieces import StepPieces, make_step_pieces
from deltaserve.compute.executor.step_recorder import StepRecorder, recorder_of
from deltaserve.compute.executor.step_threads import StepThreads
from deltaserve.compute.executor.unread_rows import UnreadRows
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.compute.layers.draft_head import DraftHead
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.layers.native_ops import check_deterministic, usable_quantization
from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.native.core_share import CoreShare
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.compute.weights.loader import load_weights
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, StepPlan, StepResult, TokenValues
from deltaserve.core.errors import ConfigError, StateError
from deltaserve.core.ids import RowId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.quantization import Quantization
from deltaserve.core.rounding import Rounding
from deltaserve.core.transport import Sharing
from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.model.drafts.draft_algorithm import OFF, draft_algorithm
from deltaserve.model.drafts.drafter import Drafter
from deltaserve.model.model_spec import ModelSpec

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
    """Threads of this process's torch, and of the native library."""
    least_threads: int = 1
    """Threads that compute even where more would wait for cores; at most `num_threads`."""
    core_share: CoreShare | None = None
    """Which threads compute only on cores where nobody else does; None: none of them. With the native library."""
    attention_backend: str = "auto"
    rounding: Rounding = Rounding.OF_QUERY
    sharing: Sharing = Sharing.PRIVATE
    """Who else maps the memory of the pages."""
    drafts: str = OFF
    """Who guesses at the next tokens."""
    quantization: Quantization = "auto"
    """Which matrices are codes; none are where the native library does not compute."""
    graph_rows: int | None = None
    """Rows of the largest decode step that is recorded and replayed, and tokens of one that the host draws for, or of a
    draft head's pass; None: none is."""
    piece_tokens: int | None = None
    """Tokens of the largest other step that is recorded in pieces; None: none is. See `most_piece_tokens`."""
    recorder: Callable[[torch.device], StepRecorder | None] = recorder_of
    """Makes what records them on a device; None: nothing can."""
    grammars: AnswerGrammars | None = None
    """Grammars of the model's answers; None: rows with one cannot be drawn for."""

    @property
    def own_threads(self) -> int:
        """Threads that compute also where others do."""
        return self.num_threads if self.core_share is None else self.core_share.own_threads


def _with_shared_cores(sizes: ExecutorSizes, share: CoreShare, native: NativeContext | None) -> ExecutorSizes:
    """The sizes with the threads of a share. Without shared cores a worker computes with its own threads alone."""
    if native is not None:
        try:
            native.share_cores(share)
            return sizes
        except OSError as error:
            _log.warning("%s: %s; no core is borrowed", share.path, error.strerror)
            native.use_threads(share.own_threads)
    return replace(sizes, num_threads=share.own_threads, core_share=None)


class TorchExecutor:
    """One rank's Executor. Called from one thread; `memory` may be used from another.

    All ranks of a worker execute the same plans. The first one draws the tokens; the results of the others hold none,
    and plans give them every input token by value. Which collectives a step makes follows from its plan alone.

    `launch` gives a step to a device that computes beside the host, and the step behind it before anybody has read
    what the first one drew: its tokens stay in the device's memory. Steps whose tokens the host must see at once
    (guesses, log-probabilities, grammars, bad words, several ranks) are computed as by `execute`, which waits for the
    device.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheSpec,
        sizes: ExecutorSizes,
        device: torch.device,
        native: NativeContext | None,
        drafter: Drafter | None = None,
        head: DraftHead | None = None,
    ) -> None:
        """`native` None: attention by torch. Raises ConfigError where it cannot be had as `sizes` ask for it."""
        self._shard = decoder.shard
        self.memory = DeviceMemory(cache, sizes.num_pages, device, self._shard, sizes.sharing)
        self._tables = PageTable(cache.num_pools, sizes.max_rows, cache.num_pages(sizes.max_context_len))
        self._attention = make_attention(
            sizes.attention_backend, native, self.memory.kv, self._tables, decoder.local.query_heads
        )
        self._decoder = decoder
        self._device = device
        self._max_context_len = sizes.max_context_len
        self._head = head
        self._rows: dict[RowId, Row] = {}
        self._draws = HostDraws(decoder, self._rows, drafter, device)
        self._grammars = GrammarMasks(sizes.grammars, decoder.spec.vocab_size)
        self._threads = StepThreads(native, sizes.least_threads, sizes.num_threads)
        self._under_way: deque[Launched] = deque()
        self._resident = ResidentRows(self._tables, cache.num_pools, sizes.max_rows, device)
        self._unread = UnreadRows(decoder, self._resident, device)
        self._clock = StepClock()
        self._recorded: RecordedSteps | None = None
        self._pieces: StepPieces | None = None
        if sizes.graph_rows is not None:
            most = min(sizes.graph_rows, sizes.max_rows), sizes.graph_rows
            recorder = sizes.recorder(device)
            self._recorded = make_recorded_steps(decoder, self._attention, self._resident, most, recorder)
            if sizes.piece_tokens is not None:
                self._pieces = make_step_pieces(decoder, sizes.piece_tokens, sizes.max_rows, recorder)
        self._guessing = None if head is None else self._drafter_of(head, sizes.max_rows)
        self._decode: ResidentDecode | None = None
        if self._recorded is not None and drafter is None and head is None:  # who guesses reads all that was drawn
            self._decode = ResidentDecode(self._recorded.drawing, self._resident, decoder.spec.vocab_size, self._clock)

    def _drafter_of(self, head: DraftHead, max_rows: int) -> ModelDrafter:
        group = self._decoder.spec.draft_group
        launched = LaunchedPasses(head, self._attention, group, self._device)
        passes = launched if self._recorded is None else self._recorded.passes(head, group, launched)
        return ModelDrafter(head, passes, self._shard.rank, max_rows, self._device)

    @classmethod
    def load(
        cls,
        model_path: Path,
        spec: ModelSpec,
        cache: CacheSpec,
        sizes: ExecutorSizes,
        device: str = "cpu",
        dtype: DType | None = None,
        partners: Partners = Partners(),
    ) -> "TorchExecutor":
        """Read the weights, allocate the pools. `spec`, `cache`: of the whole model. `dtype` None: the checkpoint's.

        Raises ConfigError for a folder or device that cannot be used.
        """
        where = torch.device(device)
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {device} asked for, but torch sees no CUDA device")
        collective, of_weights = partners.collective, torch_dtype(dtype or spec.dtype)
        native = open_native(sizes.attention_backend, where, sizes.num_threads, sizes.rounding)
        torch.set_num_threads(sizes.own_threads)
        if sizes.core_share is not None:
            sizes = _with_shared_cores(sizes, sizes.core_share, native)
        ops = make_step_ops(native, of_weights, where, spec.num_experts > 0)
        if sizes.rounding is Rounding.OF_POSITION:
            check_deterministic(cache, dtype or spec.dtype, ops)
        quantization = usable_quantization(sizes.quantization, ops)
        weights = load_weights(model_path, spec, of_weights, where, collective.shard, quantization)
        decoder = Decoder(spec, weights, ops, collective, partners.group)
        head = None if spec.draft is None else DraftHead(spec.draft, weights, ops, collective)
        make_drafter = draft_algorithm(sizes.drafts).make_drafter
        drafter: Drafter | None = None if make_drafter is None else make_drafter()
        return cls(decoder, cache, sizes, where, native, drafter, head)

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of the largest step that is recorded in pieces; None: none is."""
        return None if self._pieces is None else self._pieces.max_tokens

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step: see control/sched/executor.py."""
        start = time.perf_counter()
        with self._threads.computing():
            self._apply(plan)
            result = self._execute(plan)
        return self._timed(result, start)

    def _timed(self, result: StepResult, start: float) -> StepResult:
        num_threads, seconds = self._threads.count, time.perf_counter() - start
        self._threads.learn(seconds)
        return replace(result, seconds=seconds, num_threads=num_threads, is_typical=not self._has_recorded())

    def _execute(self, plan: StepPlan) -> StepResult:
        """The plan has been applied."""
        self._end_all()
        if self._decode is not None:
            self._decode.end_run()
        if not plan.items:
            return StepResult(plan.step, ())
        self._check_inputs(plan)
        inputs = step_inputs(plan, self._rows)
        return self._compute_or_fail(plan, inputs) if self._is_alone else self._compute(plan, inputs)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched | AtOnce:
        """Begin a step as `execute` does, but it may return before the device has computed it. Steps end in their
        order."""
        while self._under_way and self._under_way[0].is_over:
            self._under_way.popleft().settle()
        launched_at = time.perf_counter()
        self._apply(plan)
        try:
            launched = self._launched(plan, launched_at)
        except Exception:
            _log.exception("step %d of %d tokens failed: its requests end", plan.step, plan.num_tokens)
        else:
            if launched is None:
                with self._threads.computing():
                    result = self._execute(plan)
                return AtOnce(self._timed(result, launched_at))
            self._under_way.append(launched)
            return launched
        self._end_all()
        return AtOnce(self._failed(plan))

    def _launched(self, plan: StepPlan, launched_at: float) -> Launched | None:
        """None: the host must see at once what its rows draw."""
        of_run = None if self._decode is None else self._decode.launch(plan, self._rows, launched_at)
        if of_run is not None:
            return of_run
        return self._enqueue(plan, launched_at) if self._may_stay_unread(plan) else None

    def _has_recorded(self) -> bool:
        """Whether a step was recorded since this was asked last."""
        return sum(part.recordings.take_recorded() for part in (self._recorded, self._pieces) if part is not None) > 0

    def _end_all(self) -> None:
        """Wait for what is under way: from then on rows know their tokens."""
        while self._under_way:
            launched = self._under_way.popleft()
            launched.wait()
            launched.settle()

    def _may_stay_unread(self, plan: StepPlan) -> bool:
        """Whether nothing on the host depends on the tokens that the plan's items draw. The plan has been applied."""
        if not self._is_alone or self._guessing is not None or not plan.items:
            return False
        for item in plan.items:
            sampling = self._rows[item.row].sampling
            if wants_more(item) or sampling.logprobs is not None or sampling.bad_words:
                return False
            if sampling.grammar is not None:
                return False
        return True

    def _enqueue(self, plan: StepPlan, launched_at: float) -> Launched:
        inputs = step_inputs(plan, self._rows)
        _, wanted = self._forward(plan, inputs)
        drawing = [DrawingItem(item, self._rows[item.row]) for item in plan.items if item.samples]
        ends = [end for item, end in zip(plan.items, inputs.wanted.ends, strict=True) if item.samples]
        draws = None
        if drawing:
            draws = self._unread.draw(drawing, wanted.index_select(0, self._tensor(np.array(ends, np.int64) - 1)))
        result = StepResult(
            step=plan.step,
            items=tuple(ItemResult(item.row) for item in plan.items),
            tokens_read=inputs.batch.tokens_read,
            shared_tokens_read=self._attention.shared_tokens_read(inputs.batch),
            is_typical=not self._has_recorded(),
        )
        return Launched(result, drawing, DrawsOnHost.of(draws, self._device), self._clock, launched_at)

    @torch.inference_mode()
    def accompany(self) -> None:
        """A round of the expert group in which this member has no step. Raises CollectiveError."""
        self._decoder.accompany()

    def _check_inputs(self, plan: StepPlan) -> None:
        if self._shard.rank and not all(isinstance(item.inputs, TokenValues) for item in plan.items):
            raise StateError(f"rank {self._shard.rank} draws no tokens, but step {plan.step} asks for one that it drew")

    def _compute_or_fail(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        """Raises only when the device does not answer any more.

        Only of a worker with one rank and no group: where one of several fails, the others wait for it in a
        collective, and the worker ends.
        """
        try:
            return self._compute(plan, inputs)
        except Exception:
            _log.exception("step %d of %d tokens failed: its requests end", plan.step, plan.num_tokens)
        return self._failed(plan)

    def _failed(self, plan: StepPlan) -> StepResult:
        """Results of a failed step. Not to be called from the handler of what failed: the exception holds the
        tensors of the step."""
        self._resident.forget()
        if self._decode is not None:
            self._decode.end_run()
        for row in self._rows.values():
            row.num_counted = 0
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

    @property
    def _is_alone(self) -> bool:
        return self._shard.size == 1 and not self._decoder.is_in_group

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[Hidden, Tensor]:
        """Hidden states of the step's tokens, and normed ones of the tokens that are read: [N, hidden]."""
        vocab_size = self._decoder.spec.vocab_size
        if inputs.tokens.min() < 0 or inputs.tokens.max() >= vocab_size:  # a table that is divided has no line for it
            raise StateError(f"step {plan.step} has a token outside of 0..{vocab_size - 1}")
        replayed = None if self._recorded is None else self._recorded.given.forward(inputs)
        if replayed is not None:
            return replayed, replayed.normed
        attention, states = self._attention.begin_step(inputs.batch), self._attention.begin_states(inputs.batch)
        tokens, positions = self._tensor(inputs.tokens), self._tensor(inputs.positions)
        if len(inputs.unread.places):
            drawn = self._resident.last_drawn.index_select(0, self._tensor(inputs.unread.rows))
            tokens = tokens.index_copy(0, self._tensor(inputs.unread.places), drawn)
        reads_all = self._head is not None and self._head.reads_all
        last = None if reads_all else self._last_tokens(inputs)
        hidden = (self._pieces or self._decoder).forward(tokens, positions, attention, last, states)
        wanted = hidden.normed
        if len(wanted) != len(inputs.wanted.tokens):
            wanted = wanted.index_select(0, self._tensor(inputs.wanted.tokens))
        return hidden, wanted

    def _compute(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        masks = self._grammars.begin(plan.items, self._rows) if self._shard.rank == 0 else None
        hidden, wanted = self._forward(plan, inputs)
        items = self._draws.results(plan, inputs, wanted, masks)
        drawn = self._known_to_all(plan, items)
        undecided = [(item, tokens) for item, tokens in zip(plan.items, drawn, strict=True) if item.num_drafts]
        self._decoder.settle(hidden, [item.num_known + max(0, len(tokens) - 1) for item, tokens in undecided])
        draft_start = time.perf_counter()
        if self._guessing is not None:
            items = self._guessing.follow(plan, hidden, self._rows, items, drawn)
        if masks is not None:
            items = tuple(self._with_allowed_drafts(item) for item in items)
        result = StepResult(
            step=plan.step,
            items=items,
            draft_seconds=time.perf_counter() - draft_start,
            tokens_read=inputs.batch.tokens_read,
            shared_tokens_read=self._attention.shared_tokens_read(inputs.batch),
        )
        self._wait_for_device()
        return result

    def _known_to_all(self, plan: StepPlan, results: Sequence[ItemResult]) -> list[list[int]]:
        """Tokens drawn for each item, on every rank, where something is made of them in the step or guesses may be
        among them."""
        drawn = [[sampled.token for sampled in result.drawn] for result in results]
        samples = any(item.num_drafts or (item.samples and self._guessing is not None) for item in plan.items)
        if self._shard.size == 1 or not samples:
            return drawn
        width = 2 + max(item.num_drafts for item in plan.items)
        lines = torch.zeros((len(drawn), width), dtype=torch.int64)
        for line, tokens in zip(lines, drawn, strict=True):
            line[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
        summed: list[list[int]] = self._decoder.collective.all_reduce(lines.to(self._device)).tolist()
        told = [line[1 : 1 + line[0]] for line in summed]
        if self._shard.rank:
            for item, tokens in zip(plan.items, told, strict=True):
                if tokens:
                    self._rows[item.row].give(item.q_start + item.num_known, np.array(tokens, np.int64))
        return told

    def _last_tokens(self, inputs: StepInputs) -> LastTokens | None:
        """The tokens whose hidden states are read; None: all of the step."""
        wanted = inputs.wanted
        if len(wanted.tokens) == inputs.batch.num_tokens:
            return None
        attention = self._attention.begin_step(wanted.batch) if wanted.batch.queries else ()
        return LastTokens(self._tensor(wanted.tokens), attention)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.closes:
            del self._rows[row]
            self._grammars.close(row)
            if self._guessing is not None:
                self._guessing.close(row)
        for opened in plan.opens:
            taken = self._rows[opened.row] = Row(opened, self._max_context_len, self._decoder.spec.vocab_size)
            if self._shard.rank == 0:
                self._grammars.open(opened)
            if self._decode is not None:
                self._decode.open(opened, taken)
            if self._guessing is not None:
                self._guessing.open(opened.row, opened.draft_start)
        for update in plan.pages:
            self._tables.write(update.pool, update.row, update.first_index, update.pages)
        if self._recorded is not None:
            self._resident.write_pages(plan.pages)

    def _with_allowed_drafts(self, result: ItemResult) -> ItemResult:
        """Guesses that the row's grammar refuses are not worth verifying."""
        drafts = self._grammars.allowed_drafts(self._rows[result.row], result.row, result.drafts)
        return result if drafts == result.drafts else replace(result, drafts=drafts)

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return on_device(values, self._device)
