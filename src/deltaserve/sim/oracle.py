"""The stand-in model: every KV entry is a stamp of all tokens up to it, every next token a hash of all stamps read.

    stamp(pool, i) = H(stamp(pool, i - 1) as read from its page, token i)        16 bytes, in the page like any KV
    stamp(pool, -1) = H(namespace), and of another revision of the model than the first H(namespace, revision)
    next token     = H(all stamps that its last position sees, read from its pages) mod vocab, and its log-probabilities
                     from the same H
A FULL pool's stamps are all seen, a WINDOW pool's only while in the window. A STATE pool has one slot per state: what
follows from the stamp of the last token taken in, all over the slot, read where an item begins and written where it
ends. A slot is three blocks of heads, as the inputs of a convolution are.
A request with a grammar draws by a fold over its output too, which the executor replays as real ones replay a grammar's
matcher (control/sched/grammar_replay.py): a row that goes on behind other output than its own draws other tokens.
So a page that is stale, foreign, half landed or misplaced changes the output, and the right output is a pure function
of the prompt: `oracle_answer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from deltaserve.control.sched.grammar_replay import GrammarReplay
from deltaserve.control.sched.plan import (
    ItemOutcome,
    ItemResult,
    PlanItem,
    RowOpen,
    Sampled,
    StepPlan,
    StepResult,
    TokenValues,
)
from deltaserve.control.sched.speculation import right_draws
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Namespace, PageId, PoolId, RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheGroup, CacheSpec, HeadBlock, PageGroup, StateGroup
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32, token_len
from deltaserve.sim.rank_memory import STAMP_BYTES, SplitMemory, StampMemory

DEFAULT_NAMESPACE = Namespace("")
_NAN = b"\xff" * 8
"""What a stamp starts with that is not finite."""
_UNWRITTEN = b"\xbe" * STAMP_BYTES
"""What a step that runs may leave for the moment."""


def stamp_spec(page_size: int, num_pools: int = 1, window_len: int = 9, num_heads: int = 1) -> CacheSpec:
    """A model of one layer that keeps every stamp, beside it one with a window, beside those a recurrent one.

    `num_heads`: pieces that a stamp is cut into, which ranks share.
    """
    retentions = (KEEP_ALL, Retention(Lifetime.WINDOW, window_len), Retention(Lifetime.STATE))[:num_pools]
    return CacheSpec(page_size, tuple(_stamp_group(page_size, kept, num_heads) for kept in retentions))


def _stamp_group(page_size: int, kept: Retention, num_heads: int) -> CacheGroup:
    """Pages of all pools are as large: of page_size stamps."""
    name, of_head = f"stamps-{kept.lifetime.value}", STAMP_BYTES // num_heads
    if kept.lifetime is not Lifetime.STATE:
        return PageGroup(name, 1, num_heads, of_head // DType.FLOAT32.itemsize, DType.FLOAT32, kept, planes=1)
    blocks = tuple(HeadBlock(num_heads, page_size, of_head // part) for part in (4, 4, 2))
    return StateGroup(name, 1, blocks, DType.FP8_E4M3)


FIRST_REVISION = "stamp model"
"""Fingerprint of the model that all workers have, where a run has one revision."""


def of_revision(namespace: Namespace, revision: str) -> Namespace:
    """A namespace as a revision of the model sees it: no two compute alike."""
    return namespace if revision == FIRST_REVISION else Namespace(f"{namespace}/{revision}")


class Chain:
    """The right stamps of one row in one pool, grown as its tokens become known."""

    __slots__ = ("_first", "_pool", "stamps")

    def __init__(self, pool: int, namespace: Namespace) -> None:
        """`namespace`: as `of_revision` says."""
        self._pool = bytes([pool])
        self._first = xxhash.xxh3_128_digest(namespace.encode())
        self.stamps = bytearray()

    def grow(self, tokens: bytes | bytearray, end: int) -> None:
        """Add stamps up to those of positions [0, end) of packed `tokens`."""
        digest, pool, last = xxhash.xxh3_128_digest, self._pool, bytes(self.stamps[-STAMP_BYTES:]) or self._first
        for at in range(len(self.stamps) // STAMP_BYTES * TOKEN_BYTES, end * TOKEN_BYTES, TOKEN_BYTES):
            last = digest(pool + last + tokens[at : at + TOKEN_BYTES])
            self.stamps += last

    def cut(self, end: int) -> None:
        """Back to the stamps of positions [0, end)."""
        del self.stamps[end * STAMP_BYTES :]

    def stamp(self, at: int) -> bytes:
        """The stamp of one position."""
        return bytes(self.stamps[at * STAMP_BYTES : (at + 1) * STAMP_BYTES])


def first_seen(kept: Retention, position: int) -> int:
    """First position whose stamp the token at `position` sees: of a STATE pool its own, it has taken in the rest."""
    match kept.lifetime:
        case Lifetime.FULL:
            return 0
        case Lifetime.WINDOW:
            return max(0, position + 1 - (kept.window_len or 1))
        case Lifetime.STATE:
            return position


class Fold:
    """The stand-in for a grammar's matcher: a number that follows from the grammar and every token consumed."""

    def __init__(self, grammar: str) -> None:
        self._states = [xxhash.xxh3_64_intdigest(grammar.encode())]

    @property
    def state(self) -> int:
        return self._states[-1]

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token in sampled_tokens:
            self._states.append(xxhash.xxh3_64_intdigest(pack_u32([token]), self.state))
        return True

    def rollback(self, num_tokens: int) -> bool:
        del self._states[len(self._states) - num_tokens :]
        return True


def next_token(
    stamps: Sequence[bytes], vocab_size: int, num_top: int | None = None, flavour: int = 0, fold: int = 0
) -> Sampled:
    """`stamps`: all stamps that the last position sees, one concatenation per pool. `fold`: of a request with a
    grammar."""
    digest = xxhash.xxh3_64_intdigest(b"".join(stamps), flavour ^ fold)
    return Sampled(digest % vocab_size, None if num_top is None else _logprobs(digest, vocab_size, num_top))


def prompt_logprobs(chains: Sequence[Chain], token: bytes, at: int, vocab_size: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the packed `token` that stands at position `at` >= 1."""
    before = b"".join([chain.stamp(at - 1) for chain in chains])
    return _logprobs(xxhash.xxh3_64_intdigest(before + token), vocab_size, num_top)


def _logprobs(digest: int, vocab_size: int, num_top: int) -> TokenLogprobs:
    logprob = -(digest >> 40) / (1 << 20)
    top = tuple(((digest + i) % vocab_size, logprob - i) for i in range(num_top))
    return TokenLogprobs(logprob, top)


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """What a request must get, whatever happened on the way."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def oracle_answer(
    prompt: bytes,
    sampling: SamplingParams,
    vocab_size: int,
    pools: tuple[Retention, ...] = (KEEP_ALL,),
    namespace: Namespace = DEFAULT_NAMESPACE,
    heard: Sequence[Sampled] = (),
    flavours: int = 1,
) -> OracleAnswer:
    """`heard`: what came. Of each token the flavour that explains it is taken, for what comes next depends on it."""
    tokens, chains = bytearray(prompt), [Chain(pool, namespace) for pool in range(len(pools))]
    output: list[Sampled] = []
    fold = None if sampling.grammar is None else Fold(sampling.grammar)
    while len(output) < sampling.max_tokens:
        num_tokens = len(tokens) // TOKEN_BYTES
        for chain in chains:
            chain.grow(tokens, num_tokens)
        firsts = (first_seen(kept, num_tokens - 1) * STAMP_BYTES for kept in pools)
        seen = [bytes(chain.stamps[first:]) for chain, first in zip(chains, firsts, strict=True)]
        state = 0 if fold is None else fold.state
        choices = [next_token(seen, vocab_size, sampling.logprobs, flavour, state) for flavour in range(flavours)]
        wanted = heard[len(output)] if len(output) < len(heard) else None
        sampled = wanted if wanted in choices else choices[0]
        output.append(sampled)
        tokens += pack_u32([sampled.token])
        if fold is not None:
            fold.consume_tokens([sampled.token])
        is_long = len(output) > sampling.min_tokens or sampling.grammar is not None
        if sampled.token in sampling.stop_token_ids and is_long:
            break
    of_prompt: tuple[TokenLogprobs, ...] = ()
    if (num_top := sampling.prompt_logprobs) is not None:
        known = [(prompt[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES], at) for at in range(1, token_len(prompt))]
        of_prompt = tuple(prompt_logprobs(chains, token, at, vocab_size, num_top) for token, at in known)
    logprobs = tuple(s.logprobs for s in output if s.logprobs is not None)
    return OracleAnswer(tuple(s.token for s in output), logprobs, of_prompt)


@dataclass(slots=True)
class _Row:
    sampling: SamplingParams
    tokens: bytearray
    chains: list[Chain]
    tables: list[dict[int, PageId]] = field(default_factory=list)
    """Per pool: page index |-> page."""
    drawn: tuple[StepIndex | None, int] = (None, 0)
    """Step in which a token was drawn last, and the token."""
    prompt_len: int = 0
    replay: GrammarReplay[Fold] | None = None

    def fold(self, end: int) -> int:
        """State of the grammar behind the output before position `end`; 0 without one."""
        if self.replay is None:
            return 0
        matcher = self.replay.behind(bytes(self.tokens[self.prompt_len * TOKEN_BYTES : end * TOKEN_BYTES]))
        return 0 if matcher is None else matcher.state

    def grow(self, tokens: bytes, start: int) -> None:
        """Packed tokens from position `start` on are computed."""
        end = start + token_len(tokens)
        self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES] = tokens
        for chain in self.chains:
            chain.grow(self.tokens, end)

    def cut(self, end: int) -> None:
        """Tokens from position `end` on were guesses that are wrong."""
        del self.tokens[end * TOKEN_BYTES :]
        for chain in self.chains:
            chain.cut(end)


@dataclass(frozen=True, slots=True)
class _SeenStamps:
    """What the positions of an item see of one pool."""

    kept: Retention
    start: int
    """First position of `stamps`."""
    stamps: bytes

    def of(self, position: int) -> bytes:
        first = first_seen(self.kept, position) - self.start
        return self.stamps[first * STAMP_BYTES : (position + 1 - self.start) * STAMP_BYTES]


class OracleExecutor:
    """The Executor of a simulated rank. Raises IntegrityError when a page it reads holds anything but its row's KV."""

    def __init__(
        self,
        cache: CacheSpec,
        memory: StampMemory | SplitMemory,
        vocab_size: int,
        revision: str = FIRST_REVISION,
    ) -> None:
        self._revision = revision
        self._cache, self._pools = cache, cache.pools
        self._memory = memory
        self._vocab_size = vocab_size
        self._rows: dict[RowId, _Row] = {}
        self.namespaces: dict[RowId, Namespace] = {}
        """Namespaces of rows about to be opened: a plan does not say."""
        self.spoil_next = False
        """The next step computes KV that is not finite, and logits from it; so does whoever reads that KV."""
        self.spoiled: list[tuple[Namespace, bytes]] = []
        """Packed tokens, as known at the time, of rows that were spoiled."""
        self.not_finite: list[tuple[Namespace, bytes]] = []
        """Rows of which no token could be drawn: whoever runs this knows."""
        self.has_resumed_grammar = False
        """Whether a row with a grammar began behind output of an earlier life."""
        self.flavours = 1
        self.first_flavour = 0
        """Flavour of step 0; from step to step it is another one."""
        self._launched: StepIndex | None = None

    def launch(self, plan: StepPlan) -> None:
        """The device begins, and works beside the host until `execute` answers: it may read and write at any time.

        What is to be written holds nothing meanwhile. What is to be read is read now in every other step, else later.
        """
        self._launched = plan.step
        for row in plan.closes:
            del self._rows[row]
        for opened in plan.opens:
            self._open(opened)
        for update in plan.pages:
            table = self._rows[update.row].tables[update.pool]
            table.update(enumerate(update.pages, update.first_index))
        for item in plan.items:
            self._begin(item)
            if plan.step % 2:
                self._read_ahead(item)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._launched != plan.step:
            self.launch(plan)
        self._launched = None
        flavour = (self.first_flavour + plan.step) % self.flavours
        results = tuple(self._compute(item, flavour) for item in plan.items)
        for result in results:
            if result.drawn:
                self._rows[result.row].drawn = plan.step, result.drawn[-1].token
        if self.spoil_next:
            self.spoiled += [self._prompt(item.row) for item in plan.items]
        self.not_finite += [self._prompt(r.row) for r in results if r.outcome is ItemOutcome.NOT_FINITE]
        self.spoil_next = False
        return StepResult(plan.step, results).compact(plan)

    def _prompt(self, row: RowId) -> tuple[Namespace, bytes]:
        return self.namespaces.get(row, DEFAULT_NAMESPACE), bytes(self._rows[row].tokens)

    def _open(self, opened: RowOpen) -> None:
        pools = range(self._cache.num_pools)
        namespace = self.namespaces.get(opened.row, Namespace(""))
        chains = [Chain(pool, of_revision(namespace, self._revision)) for pool in pools]
        row = _Row(opened.sampling, bytearray(opened.tokens), chains, [{} for _ in pools], prompt_len=opened.prompt_len)
        grammar = opened.sampling.grammar
        if grammar is not None:
            row.replay = GrammarReplay(lambda: Fold(grammar))
            self.has_resumed_grammar |= token_len(opened.tokens) > opened.prompt_len
        self._rows[opened.row] = row

    def _begin(self, item: PlanItem) -> None:
        row = self._rows[item.row]
        row.grow(self._input(row, item), item.q_start)
        for pool, kept in enumerate(self._pools):
            if kept.lifetime is not Lifetime.STATE:  # that goes on in the slot it is read from
                self._memory.write_stamps(PoolId(pool), row.tables[pool], item.q_start, _UNWRITTEN * item.q_len)

    @staticmethod
    def _input(row: _Row, item: PlanItem) -> bytes:
        """What the row has drawn; where it could not draw, any token: whatever comes of it is dropped."""
        if isinstance(item.inputs, TokenValues):
            return item.inputs.tokens
        step, token = row.drawn
        return pack_u32([token if step == item.inputs.step else 0])

    def _read_ahead(self, item: PlanItem) -> None:
        for pool, kept in enumerate(self._pools):
            if kept.lifetime is not Lifetime.STATE:
                self._read(self._rows[item.row], PoolId(pool), item)

    def _compute(self, item: PlanItem, flavour: int) -> ItemResult:
        row = self._rows[item.row]
        found = [
            (self._go_on if kept.lifetime is Lifetime.STATE else self._extend)(row, PoolId(pool), item)
            for pool, kept in enumerate(self._pools)
        ]
        seen = [of_pool for of_pool in found if of_pool is not None]
        of_prompt = self._prompt_logprobs(row, item) if item.wants_prompt_logprobs else ()
        behind = item.q_start + item.num_known

        def draw(place: int) -> Sampled | None:
            if len(seen) < len(found):
                return None
            read = [of_pool.of(behind + place - 1) for of_pool in seen]
            return next_token(read, self._vocab_size, row.sampling.logprobs, flavour, row.fold(behind + place))

        drawn = right_draws(item, row.sampling, behind - row.prompt_len, draw) if item.samples else ()
        end = behind + max(0, len(drawn) - 1)
        if item.num_drafts:
            row.cut(end)
        for pool, kept in enumerate(self._pools):
            if kept.lifetime is Lifetime.STATE:
                slot = row.tables[pool][(item.q_start + item.q_len - 1) // self._cache.page_size]
                state = state_of(row.chains[pool].stamp(end - 1), self._cache.page_size)
                state = state if found[pool] is not None else _not_finite(state)
                self._memory.write_state(PoolId(pool), slot, state)
        if item.samples and not drawn:
            return ItemResult(item.row, outcome=ItemOutcome.NOT_FINITE)
        drafts = self._guess(row, item, drawn, flavour) if drawn and item.wanted_drafts else b""
        return ItemResult(item.row, drawn, prompt_logprobs=of_prompt, drafts=drafts)

    def _guess(self, row: _Row, item: PlanItem, drawn: Sequence[Sampled], flavour: int) -> bytes:
        """Right guesses and wrong ones: which, is a matter of the tokens so far."""
        known = token_len(row.tokens)
        row.grow(pack_u32([drawn[-1].token]), known)
        guesses: list[int] = []
        for _ in range(item.wanted_drafts):
            end = token_len(row.tokens)
            seen = [
                bytes(chain.stamps[first_seen(kept, end - 1) * STAMP_BYTES :])
                for chain, kept in zip(row.chains, self._pools, strict=True)
            ]
            right = next_token(seen, self._vocab_size, None, (flavour + 1) % self.flavours, row.fold(end)).token
            is_right = row.chains[0].stamps[-1] % 4
            guesses.append(right if is_right else (right + 1) % self._vocab_size)
            row.grow(pack_u32(guesses[-1:]), end)
        row.cut(known)
        return pack_u32(guesses)

    def _prompt_logprobs(self, row: _Row, item: PlanItem) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the tokens at q_start + 1 .. q_start + q_len, as far as they are known."""
        end, num_top = item.q_start + item.q_len, row.sampling.prompt_logprobs or 0
        known = range(item.q_start + 1, min(end + 1, token_len(row.tokens)))
        tokens = [(bytes(row.tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]), at) for at in known]
        return tuple(prompt_logprobs(row.chains, token, at, self._vocab_size, num_top) for token, at in tokens)

    def _extend(self, row: _Row, pool: PoolId, item: PlanItem) -> _SeenStamps | None:
        """Read the stamps that the item's positions see, write theirs.

        None: they are not finite, because those read are not, or because they are to be spoiled.
        """
        table, chain, end = row.tables[pool], row.chains[pool], item.q_start + item.q_len
        start, stood, is_finite = self._read(row, pool, item)
        computed = bytes(chain.stamps[item.q_start * STAMP_BYTES : end * STAMP_BYTES])
        if not is_finite or self.spoil_next:
            self._memory.write_stamps(pool, table, item.q_start, _not_finite(computed))
            return None
        self._memory.write_stamps(pool, table, item.q_start, computed)
        return _SeenStamps(self._pools[pool], start, stood + computed)

    def _read(self, row: _Row, pool: PoolId, item: PlanItem) -> tuple[int, bytes, bool]:
        """First position that the item sees, the stamps from there to its own, and whether they are finite."""
        table, chain, kept, size = row.tables[pool], row.chains[pool], self._pools[pool], self._cache.page_size
        start = first_seen(kept, item.q_start)
        pages = [table[index] for index in range(start // size, self._cache.num_pages(item.q_start))]
        offset = start % size * STAMP_BYTES
        stood = self._memory.pages(pool, pages)[offset : offset + (item.q_start - start) * STAMP_BYTES]
        right = bytes(chain.stamps[start * STAMP_BYTES : item.q_start * STAMP_BYTES])
        is_finite = stood == right or _is_own(stood, right, f"row {item.row} from position {start} on, pool {pool}")
        return start, stood, is_finite

    def _go_on(self, row: _Row, pool: PoolId, item: PlanItem) -> _SeenStamps | None:
        """Go on from the state before the item's positions. None: it is not finite, or is to be spoiled."""
        table, chain, size = row.tables[pool], row.chains[pool], self._cache.page_size
        is_finite = not self.spoil_next
        if item.q_start:
            slot = table[(item.q_start - 1) // size]
            stood, right = self._memory.pages(pool, [slot]), state_of(chain.stamp(item.q_start - 1), size)
            where = f"row {item.row} goes on at {item.q_start}, slot {slot}"
            is_finite &= stood == right or _is_own(stood, right, where)
        computed = bytes(chain.stamps[item.q_start * STAMP_BYTES :])
        return _SeenStamps(self._pools[pool], item.q_start, computed) if is_finite else None


def state_of(stamp: bytes, page_size: int) -> bytes:
    """What fills a slot: no two parts of it look alike, so that none passes for another."""
    return b"".join([xxhash.xxh3_128_digest(stamp + bytes([part])) for part in range(page_size)])


def is_state_of(stood: bytes, chain: Chain, tokens: bytes) -> bool:
    """Whether a slot holds the state behind exactly these packed tokens, finite or not. `chain`: at its start."""
    num_tokens = token_len(tokens)
    chain.grow(tokens, num_tokens)
    right = state_of(chain.stamp(num_tokens - 1), len(stood) // STAMP_BYTES)
    return stood in (right, _not_finite(right))


def _is_own(stood: bytes, right: bytes, where: str) -> bool:
    """Whether what stands there is finite. I6: it must be the row's own, finite or not."""
    for at in range(0, len(right), STAMP_BYTES):
        stamp, expected = stood[at : at + STAMP_BYTES], right[at : at + STAMP_BYTES]
        if stamp not in (expected, _not_finite(expected)):
            raise IntegrityError(f"I6: foreign bytes: {where}, {at // STAMP_BYTES} stamps further")
    return stood == right


def _not_finite(stamps: bytes) -> bytes:
    """Stamps of the same KV, computed wrong: still of these tokens, but of no use."""
    size = STAMP_BYTES
    return b"".join([_NAN + stamps[at + len(_NAN) : at + size] for at in range(0, len(stamps), size)])
