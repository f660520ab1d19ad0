"""StepPlan and StepResult: all that passes between the control plane and the executor. Frozen data.

The executor keeps one *row* per running request: its page table line(s), its tokens and its sampling state. A plan
opens rows, changes pages of rows, lists what each row computes, and closes rows. Order of application in a step:
`closes`, `opens`, `pages`, then the items.

An executor that keeps rows on its device need not look at every item of a step. `StepPlan.decode` names the rows that
decode the token which they drew in the step before; they are the first items. It tells what has changed:

    plan.decode.continues(before.decode)    the rows are those of the step before, each one position on
    plan.decode.rows.joined, .left          else: the rows that are new among them, and those that left them
    plan.pages                              the pages that rows got
    plan.work.shared is before.work.shared  what they read in common is what it was

`StepResult.decoded` answers those rows with one array. So a step in which no row joins, leaves or comes to a new page
costs neither side anything for each row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import overload

from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.tokens import pack_u32, unpack_u32


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A request takes a row. Its pages follow as `PageUpdate`s of the same plan."""

    row: RowId
    sampling: SamplingParams
    tokens: bytes
    """Packed ids known so far (prompt, and output of an earlier life): history of penalties, inputs of extends."""
    prompt_len: int
    """Tokens of the original prompt: output position of the token at index i is i - prompt_len."""
    draft_start: DraftStart | None = None
    """Where a draft head begins; None: where the row's first item does."""


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """(row, page index) |-> page, for page indexes [first_index, first_index + len(pages)) of one pool."""

    row: RowId
    pool: PoolId
    first_index: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Input tokens given by value: packed ids of positions [q_start, q_start + q_len)."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class TokenOf:
    """The one input token is what this row sampled in an earlier step (overlap depth 1)."""

    step: StepIndex


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One row computes positions [q_start, q_start + q_len): decode is one known token, extend is more.

    KV of [0, q_start) is in the row's pages; KV of the computed positions is written there. That of guesses that prove
    wrong is of no use, and written over by the next item.
    """

    row: RowId
    q_start: int
    q_len: int
    inputs: TokenValues | TokenOf
    samples: bool
    """Whether a token is drawn after the last known position (false for all but a prompt's last chunk)."""
    wants_prompt_logprobs: bool = False
    """Log-probabilities of the *input* tokens at positions q_start + 1 .. q_start + q_len of the row's tokens."""
    num_drafts: int = 0
    """The last so many input tokens are guesses. A token is drawn after the last known one, and after each guess as
    long as all before it were what was drawn (control/sched/speculation.py)."""
    wanted_drafts: int = 0
    """Most guesses at what follows that may come with the result. A draft head writes behind the tokens that were
    drawn, into the row's pages: there is room for that."""
    wants_features: bool = False
    """What a draft head reads of the last known token comes with the result: another worker goes on behind it."""

    @property
    def num_known(self) -> int:
        """Input tokens that are no guesses."""
        return self.q_len - self.num_drafts

    @property
    def is_decode(self) -> bool:
        """Whether it goes on behind a token that was drawn, or computes the last one of a prompt."""
        return self.samples and self.num_known == 1


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Positions [start, end) are the same pages for all `rows`: read once for all of them.

    start and end are multiples of `WorkList.split_tokens` and end <= q_start of every row. The pages stand in the page
    table line of any of the rows. A row may be in several disjoint runs (root to leaf).
    """

    start: int
    end: int
    rows: tuple[RowId, ...]


@dataclass(frozen=True, slots=True)
class WorkList:
    """How attention reads the KV of a batch.

    Every row's positions [0, q_start + q_len) are cut at absolute multiples of `split_tokens`; whole splits below
    q_start may be shared; what no run covers is read privately; only the part from the last multiple at or below
    q_start is causal. The cut depends on the request's own positions alone, so the result of a row has equal bits
    whether its splits are shared or not.
    """

    split_tokens: int
    shared: tuple[SharedRun, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows that decode one token in a step, in the order of their items. The same object as long as they are the same
    rows, each of which goes on by one position a step."""

    rows: tuple[RowId, ...]
    bases: tuple[int, ...]
    """Position that each row computes, less `DecodePart.clock`."""
    joined: tuple[RowId, ...]
    """Rows that are new among them since the plan before: each of them drew a token in that one's step."""
    left: tuple[RowId, ...]
    """Rows that were among those of the plan before and are not any more. One of that number may have joined since."""


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The part of a step that such rows have: each computes the token that it drew in the step before, and draws the
    next one."""

    rows: DecodeRows
    clock: int
    """Steps by which the rows have gone on: row i computes position `rows.bases[i] + clock`."""
    drawn_in: StepIndex
    """The step before."""

    def continues(self, before: "DecodePart | None") -> bool:
        """Whether the rows are those of `before`, the decode rows of the step before, each one position on."""
        return before is not None and self.rows is before.rows and self.clock == before.clock + 1

    def __len__(self) -> int:
        return len(self.rows.rows)

    def items(self) -> tuple[PlanItem, ...]:
        """One for each row."""
        inputs, clock = TokenOf(self.drawn_in), self.clock
        rows = zip(self.rows.rows, self.rows.bases, strict=True)
        return tuple(PlanItem(row, base + clock, 1, inputs, samples=True) for row, base in rows)


class PlanItems(Sequence[PlanItem]):
    """The items of a plan: those of its decode rows, which are made when somebody asks for them, and the others."""

    __slots__ = ("_all", "_decode", "others")

    def __init__(self, decode: DecodePart, others: tuple[PlanItem, ...]) -> None:
        self._decode = decode
        self.others = others
        self._all: tuple[PlanItem, ...] | None = None

    def _items(self) -> tuple[PlanItem, ...]:
        if self._all is None:
            self._all = (*self._decode.items(), *self.others)
        return self._all

    def __len__(self) -> int:
        return len(self._decode) + len(self.others)

    def __iter__(self) -> Iterator[PlanItem]:
        return iter(self._items())

    @overload
    def __getitem__(self, index: int) -> PlanItem: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PlanItem, ...]: ...

    def __getitem__(self, index: int | slice) -> PlanItem | tuple[PlanItem, ...]:
        return self._items()[index]

    def __repr__(self) -> str:
        return repr(self._items())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one rank group. Rows in `items` are distinct."""

    step: StepIndex
    items: Sequence[PlanItem]
    work: WorkList
    opens: tuple[RowOpen, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    closes: tuple[RowId, ...] = ()
    least_likely: float = 0.0
    """A draft head goes on guessing at a row as long as it holds all its guesses there right with this probability."""
    decode: DecodePart | None = None
    """The rows of the first items, which go on from what they drew in the step before; None: the plan says so of none.
    Other items may decode, too: of rows that were not in the step before, or whose log-probabilities are asked for."""

    @property
    def others(self) -> Sequence[PlanItem]:
        """The items behind those of `decode`."""
        return self.items.others if isinstance(self.items, PlanItems) else self.items[self.num_going_on :]

    @property
    def num_going_on(self) -> int:
        """Rows of `decode`."""
        return 0 if self.decode is None else len(self.decode)

    @property
    def num_decoded(self) -> int:
        """Input tokens of the items that decode, guesses among them."""
        return self.num_going_on + sum(item.q_len for item in self.others if item.is_decode)

    @property
    def num_extended(self) -> int:
        """Input tokens of all other items."""
        return sum(item.q_len for item in self.others if not item.is_decode)

    @property
    def num_tokens(self) -> int:
        return self.num_going_on + sum(item.q_len for item in self.others)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token drawn for a row."""

    token: int
    logprobs: TokenLogprobs | None = None


class ItemOutcome(Enum):
    """What became of one PlanItem. All but COMPUTED end its request, and what the item wrote is not cached."""

    COMPUTED = "computed"
    NOT_FINITE = "not finite"
    """NaN or Inf in the logits."""
    FAILED = "failed"
    """The step could not be computed, for want of memory for instance."""
    NO_GRAMMAR = "no grammar"
    """The row's grammar told nothing of what may be drawn: it met a limit, or the output is none of its."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Answer to one PlanItem, in the order of the plan."""

    row: RowId
    drawn: tuple[Sampled, ...] = ()
    """One after the other. None for an item that does not sample, and for one that was not computed; more than one
    where guesses were right."""
    outcome: ItemOutcome = ItemOutcome.COMPUTED
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    features: bytes = b""
    """Features asked for by `PlanItem.wants_features`; empty where there is no draft head."""
    drafts: bytes = b""
    """Packed ids that may follow the tokens drawn: guesses, `PlanItem.wanted_drafts` at most."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to exactly one plan."""

    step: StepIndex
    items: tuple[ItemResult, ...]
    """Answers to the items, to those of `decode` among them where `decoded` is not given."""
    tokens_read: int = 0
    """KV token positions attention needed, summed over rows (one layer)."""
    shared_tokens_read: int = 0
    """Positions among `tokens_read` not read again because another row of the same run read them."""
    seconds: float = field(default=0.0, compare=False)
    draft_seconds: float = field(default=0.0, compare=False)
    """Seconds among `seconds` that a draft head took: one pass, or as many as there are guesses at one row."""
    num_threads: int | None = field(default=None, compare=False)
    """Threads that computed the step; None: nobody counts them."""
    decoded: bytes | None = None
    """Packed ids that the rows of the plan's `decode` drew, one each, in their order: every one of them was COMPUTED
    and drew a token, without log-probabilities. None: `items` answers them, too."""
    is_typical: bool = field(default=True, compare=False)
    """Whether the next step of its kind takes about as long. False: something was compiled or recorded in it."""

    @property
    def typical_s(self) -> float | None:
        """`seconds`, where rates and costs may be learned from them."""
        return self.seconds if self.is_typical and self.seconds > 0.0 else None

    def of_all(self, plan: StepPlan) -> tuple[ItemResult, ...]:
        """The answers to all items of `plan`, which this is the answer to."""
        if self.decoded is None or plan.decode is None:
            return self.items
        drawn = zip(plan.decode.rows.rows, unpack_u32(self.decoded), strict=True)
        return (*(ItemResult(row, (Sampled(token),)) for row, token in drawn), *self.items)

    def compact(self, plan: StepPlan) -> "StepResult":
        """The same answer, with `decoded` where that can say it."""
        count = plan.num_going_on
        if not count or self.decoded is not None or not all(map(_is_plain, self.items[:count])):
            return self
        decoded = pack_u32([item.drawn[0].token for item in self.items[:count]])
        return replace(self, items=self.items[count:], decoded=decoded)


def _is_plain(item: ItemResult) -> bool:
    return item.outcome is ItemOutcome.COMPUTED and len(item.drawn) == 1 and item.drawn[0].logprobs is None
