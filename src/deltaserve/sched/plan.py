"""StepPlan and StepResult: all that passes between the control plane and the executor. Frozen data.

The executor keeps one *row* per running request: its page table line(s), its tokens and its sampling state. A plan
opens rows, changes pages of rows, lists what each row computes, and closes rows. Order of application in a step:
`closes`, `opens`, `pages`, then the items.
"""

from dataclasses import dataclass, field
from enum import Enum

from deltaserve.base.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.base.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A request takes a row. Its pages follow as `PageUpdate`s of the same plan."""

    row: RowId
    sampling: SamplingParams
    tokens: bytes
    """Packed ids known so far (prompt, and output of an earlier life): history of penalties, inputs of extends."""
    prompt_len: int
    """Tokens of the original prompt: output position of the token at index i is i - prompt_len."""


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
    """One row computes positions [q_start, q_start + q_len): decode is q_len 1, extend is more.

    KV of [0, q_start) is in the row's pages; KV of the computed positions is written there.
    """

    row: RowId
    q_start: int
    q_len: int
    inputs: TokenValues | TokenOf
    samples: bool
    """Whether a token is drawn after the last position (false for all but a prompt's last chunk)."""
    wants_prompt_logprobs: bool = False
    """Log-probabilities of the *input* tokens at positions q_start + 1 .. q_start + q_len of the row's tokens."""


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
class StepPlan:
    """One step of one rank group. Rows in `items` are distinct."""

    step: StepIndex
    items: tuple[PlanItem, ...]
    work: WorkList
    opens: tuple[RowOpen, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    closes: tuple[RowId, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.q_len for item in self.items)


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


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Answer to one PlanItem, in the order of the plan."""

    row: RowId
    sampled: Sampled | None = None
    """None for an item that does not sample, and for one that was not computed."""
    outcome: ItemOutcome = ItemOutcome.COMPUTED
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answers exactly one plan."""

    step: StepIndex
    items: tuple[ItemResult, ...]
    tokens_read: int = 0
    """KV token positions attention needed, summed over rows (one layer)."""
    shared_tokens_read: int = 0
    """Of these, positions not read again because another row of the same run read them."""
    seconds: float = field(default=0.0, compare=False)
