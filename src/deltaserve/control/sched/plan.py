"""StepPlan and StepResult: all that passes between the control plane and the executor. Frozen data.

The executor keeps one *row* per running request: its page table line(s), its tokens and its sampling state. A plan
opens rows, changes pages of rows, lists what each row computes, and closes rows. Order of application in a step:
`closes`, `opens`, `pages`, then the items.
"""

from dataclasses import dataclass, field
from enum import Enum

from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams, TokenLogprobs


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
class StepPlan:
    """One step of one rank group. Rows in `items` are distinct."""

    step: StepIndex
    items: tuple[PlanItem, ...]
    work: WorkList
    opens: tuple[RowOpen, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    closes: tuple[RowId, ...] = ()
    least_likely: float = 0.0
    """A draft head goes on guessing at a row as long as it holds all its guesses there right with this probability."""

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
    tokens_read: int = 0
    """KV token positions attention needed, summed over rows (one layer)."""
    shared_tokens_read: int = 0
    """Positions among `tokens_read` not read again because another row of the same run read them."""
    seconds: float = field(default=0.0, compare=False)
    draft_seconds: float = field(default=0.0, compare=False)
    """Seconds among `seconds` that a draft head took: one pass, or as many as there are guesses at one row."""
    num_threads: int | None = field(default=None, compare=False)
    """Threads that computed the step; None: nobody counts them."""
