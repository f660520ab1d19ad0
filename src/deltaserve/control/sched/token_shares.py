"""Which tokens a step computes: of each decode row one and guesses behind it, of prompts chunks under a budget."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.flight import Following
from deltaserve.control.sched.plan import PlanItem, TokenOf, TokenValues
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.running import Running
from deltaserve.control.sched.speculation import Speculation, fitting_drafts
from deltaserve.core.errors import StateError
from deltaserve.core.ids import StepIndex
from deltaserve.core.tokens import TOKEN_BYTES


class _Extend(NamedTuple):
    """A prompt that is computed from `start` on."""

    request: Request
    start: int

    @property
    def left(self) -> int:
        """Tokens of it that are not computed then."""
        return self.request.num_tokens - self.start


class TokenShares:
    """Shares out one step after the other among the rows that go on."""

    def __init__(self, budget: Budget, running: Running, speculation: Speculation) -> None:
        self._budget = budget
        self._running = running
        self._speculation = speculation

    def items(self, others: Mapping[Request, Following], last: StepIndex) -> list[PlanItem]:
        """What each row computes, but those of `decoding`; `last`: the last step under way, if there is any."""
        decoding: list[Request] = []
        extending: list[_Extend] = []
        for request, behind in others.items():
            if behind.num_draws or request.num_tokens - behind.start == 1:
                decoding.append(request)
            else:
                extending.append(_Extend(request, behind.start))
        config = self._running.config
        num_decoding = len(self._running.decoding) + len(decoding)
        extends = self._shares(extending, self._extend_len(num_decoding)) if extending else []
        drafts = self._drafts(decoding, num_decoding + sum(q_len for _, q_len in extends))
        wanted = self._speculation.depth(decoding, config.max_drafts) if config.max_drafts else 0
        items = []
        for request in decoding:
            if count := others[request].num_draws:
                items.append(_item_behind(request, count, last, wanted))
                continue
            num_drafts = drafts.get(request, 0)
            one = _Extend(request, others[request].start)
            items.append(_item(one, 1, num_drafts, self._wanted_drafts(request, num_drafts, wanted)))
        for one, q_len in extends:
            items.append(_item(one, q_len, 0, self._wanted_drafts(one.request, 0, wanted) if q_len == one.left else 0))
        return items

    def _extend_len(self, num_decoding: int) -> int:
        """Tokens of prompts in a step that has so many decode rows."""
        config = self._running.config
        budget = config.step_len
        if num_decoding and config.extend_len_beside_decode is not None:
            budget = min(budget, config.extend_len_beside_decode)
        return self._running.step_target.extend_len(num_decoding, budget, min(budget, config.page_size))

    def _wanted_drafts(self, request: Request, num_drafts: int, most: int) -> int:
        """How many guesses may be made in this step, behind what it draws; `num_drafts` are verified in it.

        Memory for a draft head's is taken where it is there, as for guesses that are verified.
        """
        running = self._running
        if not most or not running.config.drafts_take_places:
            return most
        most = max(0, min(most, request.max_len - request.num_tokens - num_drafts))
        needs = running.needs.of_places(request, num_drafts + most)
        grown = self._budget.allocate(needs) if any(needs) else None
        if grown is not None:
            request.grow(grown)
        return max(0, min(most, running.needs.room_behind(request) - num_drafts))

    def _drafts(self, decoding: list[Request], num_tokens: int) -> dict[Request, int]:
        """How many guesses of each request this step verifies.

        Memory for them is taken where it is there, if need be from cached pages: nobody makes way for a guess.
        """
        running = self._running
        if not running.config.max_drafts:
            return {}
        chosen = self._speculation.choose(self.guesses(decoding), num_tokens)
        for request, num_drafts in chosen.items():
            needs = running.needs.of_next_chunk(request, num_drafts)
            grown = self._budget.allocate(needs) if any(needs) else None
            if grown is not None:
                request.grow(grown)
            chosen[request] = min(num_drafts, running.needs.room_behind(request))
        return chosen

    def guesses(self, decoding: Iterable[Request]) -> dict[Request, int]:
        """Request |-> guesses that there are, and is room for."""
        return {r: n for r in decoding if (n := fitting_drafts(r, self._running.most_drafts(r)))}

    def _shares(self, extending: list[_Extend], budget: int) -> list[tuple[_Extend, int]]:
        """Tokens of each extend in this step.

        The oldest goes first if the step can end it. Otherwise it gets half, the others the other half, the shortest
        of them first, and what one half leaves over goes to the other. So a long prompt goes on at no less than half
        the pace, and a short one behind it waits for about one step.
        """
        oldest, *others = extending
        config = self._running.config
        is_long = oldest.left > min(budget, config.chunk_len)
        kept = max(config.page_size, budget // 2) if others and is_long else budget
        left = budget - self._chunk(oldest, kept)
        shares = []
        for one in sorted(others, key=lambda one: one.left):
            q_len = self._chunk(one, left)
            if q_len:
                shares.append((one, q_len))
                left -= q_len
        q_len = self._chunk(oldest, left + self._chunk(oldest, kept))
        return [(oldest, q_len), *shares] if q_len else shares

    def _chunk(self, one: _Extend, budget: int) -> int:
        """Tokens of the next chunk: to the end of the prompt, or up to an absolute page multiple.

        A state that is to be kept ends a chunk, and with states the cuts are on their grid, if that is not too far.
        """
        config, computed = self._running.config, one.start
        allowed = min(config.chunk_len, budget)
        stop = self._running.next_stop(one.request)
        if stop is not None and stop - computed <= allowed:
            return stop - computed
        if one.left <= allowed:
            return one.left
        end = (computed + allowed) // config.page_size * config.page_size
        on_grid = end // config.grid_len * config.grid_len
        if self._running.needs.state_pools and on_grid > computed:
            end = on_grid
        return max(0, end - computed)


def _item_behind(request: Request, num_behind: int, step: StepIndex, wanted_drafts: int) -> PlanItem:
    """Plan of a row that decodes in the last `num_behind` steps: what it draws in `step`, the last of them, is computed
    next."""
    if request.row is None:
        raise StateError("a running request without a row")
    position = request.num_tokens + num_behind - 1
    return PlanItem(request.row, position, 1, TokenOf(step), samples=True, wanted_drafts=wanted_drafts)


def _item(one: _Extend, num_known: int, num_drafts: int, wanted_drafts: int) -> PlanItem:
    request, start, end = one.request, one.start, one.start + num_known
    if request.row is None:
        raise StateError("a running request without a row")
    tokens = bytes(request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
    samples = end == request.num_tokens
    return PlanItem(
        row=request.row,
        q_start=start,
        q_len=num_known + num_drafts,
        inputs=TokenValues(tokens + request.guesses.drafts[: num_drafts * TOKEN_BYTES]),
        samples=samples,
        wants_prompt_logprobs=request.sampling.prompt_logprobs is not None and start < request.prompt_len - 1,
        num_drafts=num_drafts,
        wanted_drafts=wanted_drafts if samples else 0,
        wants_features=samples and request.hands_over,
    )
