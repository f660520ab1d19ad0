"""The stand-in model: every KV entry is a stamp of all tokens up to it, every next token a hash of all stamps read.

    stamp(pool, i) = H(stamp(pool, i - 1) as read from its page, token i)        16 bytes, in the page like any KV
    stamp(pool, -1) = H(namespace)
    next token     = H(all stamps of the row, read from its pages) mod vocab
So a page that is stale, foreign, half landed or misplaced changes the output, and the right output is a pure function
of the prompt: `oracle_output`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from deltaserve.base.errors import IntegrityError
from deltaserve.base.ids import Namespace, PageId, PoolId, RowId
from deltaserve.base.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.base.tokens import TOKEN_BYTES, pack_u32, unpack_u32
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import CacheSpec, PageGroup
from deltaserve.sched.plan import ItemOutcome, ItemResult, PlanItem, RowOpen, Sampled, StepPlan, StepResult, TokenValues
from deltaserve.sim.memory import STAMP_BYTES, StampMemory

DEFAULT_NAMESPACE = Namespace("")


def stamp_spec(page_size: int, num_pools: int = 1) -> CacheSpec:
    """A model whose only layer keeps one stamp per token, in one or two pools."""
    retentions = (KEEP_ALL, Retention(Lifetime.WINDOW, 1 << 20))[:num_pools]
    groups = tuple(
        PageGroup(f"stamps-{kept.lifetime.value}", 1, 1, STAMP_BYTES // 4, DType.FLOAT32, kept, planes=1)
        for kept in retentions
    )
    return CacheSpec(page_size, groups)


class Chain:
    """The right stamps of one row in one pool, grown as its tokens become known."""

    __slots__ = ("_last", "_pool", "stamps")

    def __init__(self, pool: int, namespace: Namespace) -> None:
        self._pool = bytes([pool])
        self._last = xxhash.xxh3_128_digest(namespace.encode())
        self.stamps = bytearray()

    def grow(self, tokens: bytes | bytearray, end: int) -> None:
        """To the stamps of positions [0, end) of packed `tokens`."""
        digest, pool, last = xxhash.xxh3_128_digest, self._pool, self._last
        for at in range(len(self.stamps) // STAMP_BYTES * TOKEN_BYTES, end * TOKEN_BYTES, TOKEN_BYTES):
            last = digest(pool + last + tokens[at : at + TOKEN_BYTES])
            self.stamps += last
        self._last = last


def next_token(stamps: Sequence[bytes], vocab_size: int) -> int:
    """`stamps`: all stamps of the row, one concatenation per pool."""
    return xxhash.xxh3_64_intdigest(b"".join(stamps)) % vocab_size


def oracle_output(
    prompt: bytes, num_output: int, vocab_size: int, num_pools: int = 1, namespace: Namespace = DEFAULT_NAMESPACE
) -> tuple[int, ...]:
    """The tokens a request must get, whatever happened on the way."""
    tokens, chains = bytearray(prompt), [Chain(pool, namespace) for pool in range(num_pools)]
    output: list[int] = []
    while len(output) < num_output:
        for chain in chains:
            chain.grow(tokens, len(tokens) // TOKEN_BYTES)
        output.append(next_token([bytes(chain.stamps) for chain in chains], vocab_size))
        tokens += pack_u32(output[-1:])
    return tuple(output)


def _prompt_logprobs(tokens: bytearray, item: PlanItem) -> tuple[TokenLogprobs, ...]:
    """Position i tells of the token at i + 1, where that is known: here as its id."""
    first, end = item.q_start + 1, item.q_start + item.q_len + 1
    return tuple(
        TokenLogprobs(-float(token)) for token in unpack_u32(bytes(tokens[first * TOKEN_BYTES : end * TOKEN_BYTES]))
    )


@dataclass(slots=True)
class _Row:
    tokens: bytearray
    chains: list[Chain]
    tables: list[list[PageId]] = field(default_factory=list)


class OracleExecutor:
    """The Executor of a simulated rank. Raises IntegrityError when a page it reads holds anything but its row's KV."""

    def __init__(self, cache: CacheSpec, memory: StampMemory, vocab_size: int) -> None:
        self._cache = cache
        self._memory = memory
        self._vocab_size = vocab_size
        self._rows: dict[RowId, _Row] = {}
        self.namespaces: dict[RowId, Namespace] = {}
        """Of rows about to be opened: a plan does not say."""
        self.spoil_next = False
        """Logits of the next step that samples will not be finite."""

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.closes:
            del self._rows[row]
        for opened in plan.opens:
            self._open(opened)
        for update in plan.pages:
            table = self._rows[update.row].tables[update.pool]
            table[update.first_index : update.first_index + len(update.pages)] = update.pages
        results = tuple(self._compute(item) for item in plan.items)
        if self.spoil_next and any(result.sampled is not None for result in results):
            self.spoil_next = False
            results = tuple(self._spoil(item, result) for item, result in zip(plan.items, results, strict=True))
        return StepResult(plan.step, results)

    def _open(self, opened: RowOpen) -> None:
        pools = range(self._cache.num_pools)
        namespace = self.namespaces.get(opened.row, Namespace(""))
        chains = [Chain(pool, namespace) for pool in pools]
        self._rows[opened.row] = _Row(bytearray(opened.tokens), chains, [[] for _ in pools])

    def _compute(self, item: PlanItem) -> ItemResult:
        row = self._rows[item.row]
        if not isinstance(item.inputs, TokenValues):
            raise ValueError("the oracle runs at overlap depth 0")
        end = item.q_start + item.q_len
        row.tokens[item.q_start * TOKEN_BYTES : end * TOKEN_BYTES] = item.inputs.tokens
        chains = [self._extend(row, PoolId(pool), item) for pool in range(self._cache.num_pools)]
        logprobs = _prompt_logprobs(row.tokens, item) if item.wants_prompt_logprobs else ()
        sampled = Sampled(next_token(chains, self._vocab_size)) if item.samples else None
        return ItemResult(item.row, sampled, prompt_logprobs=logprobs)

    def _spoil(self, item: PlanItem, result: ItemResult) -> ItemResult:
        """Logits that are not finite come from KV that is not: what this item wrote must never be read."""
        if result.sampled is None:
            return result
        for pool, table in enumerate(self._rows[item.row].tables):
            self._memory.write_stamps(PoolId(pool), table, item.q_start, b"\xff" * (STAMP_BYTES * item.q_len))
        return ItemResult(item.row, outcome=ItemOutcome.NOT_FINITE)

    def _extend(self, row: _Row, pool: PoolId, item: PlanItem) -> bytes:
        """Read the stamps before the item's positions, write theirs; returns all stamps [0, end) as they now stand."""
        table, chain = row.tables[pool], row.chains[pool]
        end = item.q_start + item.q_len
        chain.grow(row.tokens, end)
        first = item.q_start * STAMP_BYTES
        stood = self._memory.pages(pool, table[: self._cache.num_pages(item.q_start)])[:first]
        if stood != chain.stamps[:first]:
            wrong = next(i for i in range(first) if stood[i] != chain.stamps[i]) // STAMP_BYTES
            page = table[wrong // self._cache.page_size]
            raise IntegrityError(f"I6: row {item.row} reads foreign bytes at position {wrong}, pool {pool} page {page}")
        self._memory.write_stamps(pool, table, item.q_start, bytes(chain.stamps[first : end * STAMP_BYTES]))
        return stood + bytes(chain.stamps[first : end * STAMP_BYTES])
