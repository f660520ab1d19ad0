"""Speculative decoding: which guesses are verified, which are right, and when guessing pays.

Guesses ("drafts") at a row's next tokens are computed together with its last token, in one small extend. At each of
these positions the row's next token is drawn as it always is, by the random number of that position; a guess is right
when it is what was drawn. For guesses that are certain of themselves, as these are (one at each place), that is
rejection sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a guess d is kept with
probability p(d), and else the token is one of p without d. Here it even gives the tokens that come without guesses.

Which guesses are worth a place in a step is a matter of cost. A step of T tokens takes about c0 + c1 T seconds, learnt
from the steps themselves. A guess that is right with probability p adds p tokens: it is verified where p / c1 is more
than the tokens a second that the step makes without it (`Speculation.choose`). So guessing ends by itself where rows
fill the machine, or where a request's guesses are wrong. Guesses that are not verified are compared with what is drawn
all the same, so how often they are right stays known. As long as guesses do not pay, steps are planned behind one that
computes, where guesses at what it draws cannot be there yet (`Speculation.pays`).

A draft head takes time for its guesses themselves, one pass for each place: `Speculation.depth` says how many are made
at most. It also says how likely it holds each guess, so how many are made is decided guess by guess: as long as all of
a row are likely enough to pay for one more pass and one more token to verify (`Speculation.least_likely`). Those are
all verified.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from deltaserve.control.sched.draft_book import DraftBook
from deltaserve.control.sched.ending import finish_of
from deltaserve.control.sched.plan import PlanItem, Sampled, TokenValues
from deltaserve.control.sched.recent import Recent
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.step_cost import StepCost
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import TOKEN_BYTES, token_len, unpack_u32

_FORGETS = 0.02
"""Weight of a new guess of any request in the running mean of how often guesses are right."""
_LEARNS = 0.1
"""Weight of a request's new guess in the running mean of how often its guesses are right."""
_HOPE = 0.7
"""How often guesses are right, before any was compared."""
_MOST = 0.98
_FREE = 0.02
"""Guesses that take no longer than this share of an empty step are always made."""
_LEAVES_OUT = 4
"""While it is not known what a guess costs, one step in so many verifies none: lengths of steps must differ."""
_LOOKS_AGAIN = 128
"""Steps after which some guesses are verified, so that their price stays known."""
_LOOKS_AT, _LOOKS_AT_EACH = 2, 2
"""Requests whose guesses those are, and guesses of each where there is a price: few cost little, and are enough to make
a step of another length."""


def right_draws(
    item: PlanItem, params: SamplingParams, first_output: int, draw: Callable[[int], Sampled | None]
) -> tuple[Sampled, ...]:
    """The tokens of an item that samples: one after the other, until a guess is not what was drawn or the output ends.

    `draw`: of the place behind the last known token (0) and behind each guess (1 ..); None: nothing can be drawn there.
    `first_output`: output position of the first token.
    """
    drafts = _drafts_of(item)
    drawn: list[Sampled] = []
    for place in range(len(drafts) + 1):
        sampled = draw(place)
        if sampled is None:
            break
        drawn.append(sampled)
        is_right = place < len(drafts) and drafts[place] == sampled.token
        if not is_right or finish_of(params, first_output + place + 1, sampled.token) is not None:
            break
    return tuple(drawn)


def _drafts_of(item: PlanItem) -> tuple[int, ...]:
    if not item.num_drafts or not isinstance(item.inputs, TokenValues):
        return ()
    return unpack_u32(item.inputs.tokens[item.num_known * TOKEN_BYTES :])


class Speculation:
    """How many guesses of each request a step verifies, and how many are made."""

    def __init__(self, cost: StepCost | None) -> None:
        """`cost`: of steps; None: all guesses are verified, and as many made, whatever they cost."""
        self._cost = cost
        self._right_share = _HOPE
        self._num_unlooked = 0
        """Steps since all guesses were verified."""
        self._passes = Recent(enough=1)
        """Seconds of a draft head's pass, lately."""
        self._drawn = 1.0
        """Tokens that a row drew in a step, lately."""
        self._verified = 0.0
        """Guesses of a row that a step verified, lately."""
        self._are_weighed = False
        """Whether guesses that are there were made because they pay."""
        self._num_unasked = 0
        """Steps since guesses were made."""
        self.totals = DraftBook()
        """Counts of guesses over all requests."""

    @property
    def _pass_s(self) -> float:
        """A pass of the draft head; 0: not known yet."""
        return self._passes.quick(0.5) or 0.0

    @property
    def right_share(self) -> float:
        """How often guesses were right lately, those included that were not verified."""
        return self._right_share

    def choose(self, most: dict[Request, int], num_tokens: int) -> dict[Request, int]:
        """Request |-> how many of its guesses, the first of them, are worth verifying.

        `most`: what there are, and is room for; `num_tokens`: of the step without them.
        """
        if self._cost is None or not most:
            return most
        price = self._cost.price
        if self._are_weighed:
            return most
        self._num_unlooked += 1
        if price is None:
            return {} if self._num_unlooked % _LEAVES_OUT == 0 else dict(_some(most))
        if self._num_unlooked >= _LOOKS_AGAIN:
            self._num_unlooked = 0
            return {request: min(count, _LOOKS_AT_EACH) for request, count in _some(most)}
        chosen = self._worth(most, num_tokens, price)
        if chosen == most:
            self._num_unlooked = 0
        return chosen

    def pays(self, most: dict[Request, int], num_tokens: int) -> bool:
        """Whether a step should be planned for guesses: `choose` would take some of these. Nothing is counted."""
        if not most:
            return False
        if self._cost is None or self._cost.price is None or self._num_unlooked + 1 >= _LOOKS_AGAIN:
            return True
        return bool(self._worth(most, num_tokens, self._cost.price))

    def go_without(self) -> None:
        """A step is planned for which there are no guesses yet."""
        self._num_unlooked += 1

    def _worth(self, most: dict[Request, int], num_tokens: int, price: float) -> dict[Request, int]:
        places = [
            (self._share_of(request) ** place, request) for request, n in most.items() for place in range(1, n + 1)
        ]
        places.sort(key=lambda found: -found[0])
        chosen: dict[Request, int] = {}
        gained, cost = float(num_tokens), 1.0 + price * num_tokens
        for probability, request in places:
            if probability * cost <= price * gained:
                break
            gained += probability
            cost += price
            chosen[request] = chosen.get(request, 0) + 1
        return chosen

    def _share_of(self, request: Request) -> float:
        share = request.guesses.right_share
        return min(_MOST, self._right_share if share is None else share)

    def depth(self, decoding: Sequence[Request], most: int) -> int:
        """How many guesses at each row may be worth making in a step, `most` at the most.

        A draft head makes them one after the other, so they lengthen the step, and more of them are verified in the
        next one: none or one, where guesses have not been worth more, else those that are likely enough. Its one pass
        over what was drawn is always made.
        """
        if self._cost is None or self._cost.price is None or self._is_free(self._cost, most):
            return most
        shares = [self._share_of(request) for request in decoding] or [self._right_share]
        tokens_a_second = [self._rate(self._cost, shares, count) for count in range(most + 1)]
        best = max(range(most + 1), key=lambda count: tokens_a_second[count])
        self._num_unasked = 0 if best else self._num_unasked + 1
        if self._num_unasked >= _LOOKS_AGAIN:
            self._num_unasked = 0
            return most
        return best if best <= 1 else most

    def least_likely(self, num_rows: int, most: int) -> float:
        """How likely all guesses at a row must be right, for one more to be worth its time; 0: whatever they are.

        `most`: what `depth` said.
        """
        self._are_weighed = False
        if self._cost is None or self._cost.price is None or not most or self._is_free(self._cost, most):
            return 0.0
        num_rows = max(1, num_rows)
        empty_s, next_s = self._cost.seconds(0) or 0.0, self._cost.seconds(1) or 0.0
        step_s = empty_s + (next_s - empty_s) * num_rows * (1 + self._verified) + self._pass_s * (1 + self._verified)
        more_s = next_s - empty_s + self._pass_s / num_rows
        self._are_weighed = True
        return min(_MOST, num_rows * self._drawn * more_s / step_s)

    def _is_free(self, cost: StepCost, most: int) -> bool:
        """Whether guesses take no time worth speaking of."""
        return most * self._pass_s <= _FREE * (cost.seconds(0) or 0.0)

    def _rate(self, cost: StepCost, shares: Sequence[float], num_drafts: int) -> float:
        """Tokens a second with so many guesses at each row; `shares`: how often those are right."""
        num_rows = len(shares)
        gained = num_rows + sum(share**place for share in shares for place in range(1, num_drafts + 1))
        step_s = cost.seconds(num_rows * (1 + num_drafts)) or 0.0
        return gained / (step_s + max(1, num_drafts) * self._pass_s)

    def learn_draft(self, items: Sequence[PlanItem], num_made: Sequence[int], seconds: float) -> None:
        """What a draft head took in a step with these items, at each of which it made so many guesses. A pass over
        prompts tells nothing of those behind it."""
        if items and all(item.is_decode for item in items):
            # One that was not likely enough took its pass, too.
            passes = [min(item.wanted_drafts, made + 1) for item, made in zip(items, num_made, strict=True)]
            pass_s = seconds / max(1, *passes)
            self._passes.add(pass_s)

    def count(self, request: Request, item: PlanItem, drawn: Sequence[Sampled]) -> None:
        """A step has drawn these tokens behind the item's known ones. The request's guesses are compared with them."""
        book = request.guesses
        for draft, sampled in zip(unpack_u32(book.drafts), drawn, strict=False):
            is_right = draft == sampled.token
            share = self._right_share if book.right_share is None else book.right_share
            book.right_share = share + _LEARNS * (is_right - share)
            self._right_share += _FORGETS * (is_right - self._right_share)
            if not is_right:
                break
        self._drawn += _FORGETS * (len(drawn) - self._drawn)
        self._verified += _FORGETS * (item.num_drafts - self._verified)
        if item.num_drafts:
            num_right = max(0, len(drawn) - 1)
            for counted in (book, self.totals):
                counted.num_rounds += 1
                counted.num_verified += item.num_drafts
                counted.num_right += num_right


def _some(most: dict[Request, int]) -> Iterator[tuple[Request, int]]:
    return islice(most.items(), _LOOKS_AT)


def fitting_drafts(request: Request, most: int) -> int:
    """How many of the request's guesses may be verified: all, or `most` of them."""
    return max(0, min(token_len(request.guesses.drafts), most))
