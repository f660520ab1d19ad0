"""One-line faults put into the production code, drawn from faults seen in the field; the simulator must find each.

A mutant replaces `old`, which must occur exactly once in its module, by `new`. `row` names what it stands for in the
list of faults; several mutants may come from one row. The killing seeds are in killing_seeds.json.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`name` is its key among the killing seeds."""

    name: str
    row: str
    module: str
    old: str
    new: str


_RECEIVER = "deltaserve.control.transfer.receiver"
_SENDER = "deltaserve.control.transfer.sender"
_ENDPOINT = "deltaserve.control.transfer.endpoint"
_LANDINGS = "deltaserve.control.transfer.landings"
_GATE = "deltaserve.control.transfer.gate"
_RANKS = "deltaserve.control.transfer.ranks"
_PLAN = "deltaserve.core.layout.copy_plan"
_PROMPT_PAGES = "deltaserve.core.layout.prompt_pages"
_COVERAGE = "deltaserve.control.transfer.coverage"
_CHAIN = "deltaserve.control.transfer.rank_chain"
_STAGING = "deltaserve.control.transfer.staging"
_STAGED_WRITER = "deltaserve.control.transfer.staged_writer"
_STAGED_READER = "deltaserve.control.transfer.staged_reader"
_RING = "deltaserve.control.transfer.ring"
_CORE = "deltaserve.control.engine.core"
_DRIVER = "deltaserve.control.engine.driver"
_TURNS = "deltaserve.control.transfer.plane_turns"
_RANK_PLANE = "deltaserve.control.transfer.rank_plane"
_SERVING = "deltaserve.control.engine.serving"
_OUTFLOW = "deltaserve.control.engine.outflow"
_INTAKE = "deltaserve.control.engine.intake"
_BACK_READER = "deltaserve.control.engine.back_reader"
_BACK_WRITER = "deltaserve.control.engine.back_writer"
_ADDRESSES = "deltaserve.control.engine.addresses"
_OWN_HELLO = "deltaserve.control.engine.own_hello"
_ENDPOINTS = "deltaserve.control.engine.peer_endpoints"
_LINKS = "deltaserve.control.engine.peer_links"
_METER = "deltaserve.control.engine.meter"
_ROOMS = "deltaserve.control.engine.rooms"
_ENDED = "deltaserve.control.engine.ended"
_POOL = "deltaserve.control.cache.allocator"
_TREE = "deltaserve.control.cache.prefix_cache"
_EVICTION = "deltaserve.control.cache.eviction"
_RETENTION = "deltaserve.control.cache.retention_hints"
_RADIX = "deltaserve.control.cache.radix"
_TAILS = "deltaserve.control.cache.tails"
_BUDGET = "deltaserve.control.sched.budget"
_CHECKS = "deltaserve.control.engine.checks"
_WAITING = "deltaserve.control.sched.waiting"
_RUNNING = "deltaserve.control.sched.running"
_SCHEDULER = "deltaserve.control.sched.scheduler"
_STEPS = "deltaserve.control.sched.steps"
_TOKEN_SHARES = "deltaserve.control.sched.token_shares"
_GRAMMAR_REPLAY = "deltaserve.control.sched.grammar_replay"
_SPECULATION = "deltaserve.control.sched.speculation"
_ROUNDS = "deltaserve.control.sched.rounds"
_LIFECYCLE = "deltaserve.control.front.lifecycle"
_ROOM_ORDERS = "deltaserve.control.front.room_orders"
_FRONT = "deltaserve.control.front.front_core"
_WORKERS = "deltaserve.control.front.workers"
_WORKER = "deltaserve.control.front.known_worker"
_POOLS = "deltaserve.control.front.pools"
_PLACING = "deltaserve.control.front.placing"
_STREAMS = "deltaserve.control.front.streams"
_KEYS = "deltaserve.core.keys"
_TABLE = "deltaserve.control.peer.table"
_HANDSHAKE = "deltaserve.control.peer.handshake"
_CODEC = "deltaserve.core.wire.codec"
_LOOPBACK = "deltaserve.sim.loopback"
_TIER = "deltaserve.control.cache.tier"
_TIERING = "deltaserve.control.engine.tiering"
_SEAL = "deltaserve.control.transfer.slot_seal"

_BACK = "control/engine/test_write_back.py::"
_FILE = "control/engine/test_tiering.py::"
FOUND_BY_TESTS = {
    "ranks_report_of_old_greeting": "control/transfer/test_ranks.py::test_ends_are_told_in_the_order_of_the_ranks",
    "failed_write_is_clean": "control/transfer/test_endpoint.py::test_a_failed_write_is_told_once_and_drains_dirty",
    "parked_for_ever": "control/engine/test_endings.py::"
    "test_a_prompt_that_waits_for_a_grant_is_asked_about_where_its_cancel_was_lost",
    "revoked_grant_opens": "control/engine/test_protocol.py::"
    "test_prefill_ends_a_room_whose_ticket_was_closed_before_it_came",
    "let_go_and_not_told": "control/engine/test_strangers.py::"
    "test_a_late_offer_of_a_decode_worker_that_has_let_us_go_is_given_up",
    "timer_frees_quarantine": "control/engine/test_slow_links.py::"
    "test_a_writer_that_falls_silent_while_it_drains_is_fenced",
    "resumes_with_an_exchanged_prefill": "control/front/test_pools.py::"
    "test_what_goes_on_is_not_told_of_a_prefill_worker_that_was_exchanged_in_its_place",
    "cores_are_never_taken_back": "control/engine/test_driver.py::"
    "test_a_step_is_put_off_while_others_are_to_have_the_cores",
    "cores_left_for_ever": "control/engine/test_leaves_cores.py::"
    "test_where_a_prompt_waits_for_memory_here_decode_is_what_takes_long",
    "answer_unverified": _BACK + "test_without_proof_pages_enter_the_tree_when_they_are_verified",
    "grant_outlives_its_link": _BACK + "test_the_link_ends_while_pages_are_on_their_way",
    "answer_outlives_its_link": _BACK + "test_the_link_ends_while_pages_are_on_their_way",
    "fenced_by_its_answer_alone": _BACK + "test_a_failed_write_of_an_answer_ends_both_directions",
    "answer_awaited_for_ever": _BACK + "test_a_stopped_writer_is_waited_for_no_longer_than_ten_seconds",
    "other_pages_of_the_answer": _BACK + "test_prefill_computes_the_next_turn_from_it",
    "answer_behind_a_gap": _BACK + "test_what_arrives_behind_an_evicted_prefix_is_freed",
    "kept_by_a_tenant_without_bound": "property/test_hint_fairness.py::"
    "test_who_keeps_all_it_can_leaves_three_quarters_to_others",
    "kept_below_what_goes": "control/cache/test_eviction.py::"
    "test_an_order_holds_exactly_what_is_unlocked_and_keeps_the_law",
    "kept_for_ever": "control/engine/test_hints.py::test_what_is_kept_for_a_while_goes_last_on_both_sides",
    "other_ends_are_not_heard_of": "property/test_greeting_machine.py::test_another_answer_that_is_lost_is_not_missed",
    "slot_reused_while_read": "control/cache/test_tier.py::test_nothing_makes_room_while_all_is_read_or_written",
    "void_load_is_used": _FILE + "test_what_was_forgotten_while_it_was_read_is_not_used",
}
"""Mutant |-> the test that finds it: drawn runs find it too seldom for CI, or never."""

MUTANTS = (
    # one-sided memory safety
    Mutant("free_on_abort", "A1", _RECEIVER, "        if self._has_landed(ticket):\n", "        if True:\n"),
    Mutant(
        "timer_frees_quarantine",
        "A6",
        _SERVING,
        "        for name in self.receiver.overdue(turn.now):\n            self._lose(name, turn)\n",
        "        for name in self.receiver.overdue(turn.now):\n            self.receiver.fenced(name)\n",
    ),
    Mutant("dirty_drain_frees", "A5", _RECEIVER, "if outcome is Drain.DIRTY:", "if False:"),
    Mutant(
        "incomplete_done_drains",
        "A5",
        _RECEIVER,
        "landing is Landing.REPEATED or not",
        "landing is Landing.REPEATED and not",
    ),
    Mutant("ticket_id_reused", "A8", _RECEIVER, "[peer, writer_boot] = seq + 1", "[peer, writer_boot] = seq"),
    Mutant("quarantine_leaks", "C1", _RECEIVER, "            pool.drain(pages)\n", "            pass\n"),
    Mutant("source_not_pinned", "A11", _SENDER, "            pool.pin(pages)\n", "            pass\n"),
    Mutant(
        "ended_rows_go_on",
        "C1",
        _RUNNING,
        "        self.ending.setdefault(request, leave)\n        self.falls_out(request)\n",
        "        self.ending.setdefault(request, leave)\n",
    ),
    Mutant(
        "shared_under_a_step",
        "A1",
        _SCHEDULER,
        "        if not self.steps.is_in_flight(request):\n            self.running.share_step(",
        "        if True:\n            self.running.share_step(",
    ),
    Mutant("pins_leak", "C1", _SENDER, "ticket.pins[chunk] = tuple(src)", "ticket.pins[chunk] = ()"),
    Mutant(
        "fence_vouches_for_writes",
        "A5",
        _SENDER,
        "Drain.DIRTY if ticket.pins else self._after_done(ticket)",
        "Drain.CLEAN",
    ),
    Mutant(
        "repeated_grant_opens_again",
        "B1",
        _SENDER,
        "return known, GrantVerdict.REPEATED",
        "return known, GrantVerdict.OPENED",
    ),
    Mutant("chunk_cursor_stands", "G4", _SENDER, "        ticket.cursors[pool] = end\n", ""),
    Mutant(
        "early_done_is_clean",
        "A15",
        _SENDER,
        "return Drain.CLEAN if is_proven else Drain.DIRTY",
        "return Drain.CLEAN",
    ),
    Mutant(
        "drains_in_flight",
        "A5",
        _ENDPOINT,
        "            if gate.num_in_flight == 0:\n",
        "            if True:\n",
    ),
    Mutant(
        "payload_before_data",
        "A15",
        _GATE,
        "return False  # the window with the payload follows all data for that reader",
        "return True",
    ),
    Mutant("lost_completion_waits", "B1", _ENDPOINT, " or now >= posted.give_up_at", ""),
    Mutant(
        "fence_keeps_endpoint", "A12", _ENDPOINT, "result = self._transport.fence(peer)", "result = FenceResult.CLOSED"
    ),
    Mutant(
        "checksums_unread",
        "A20",
        _LANDINGS,
        "        return sums == check.checksums\n",
        "        return sums != b'?'\n",
    ),
    Mutant(
        "done_after_last_chunk",
        "B2",
        _COVERAGE,
        " and len(self.chunks) == self._last + 1 and self._num_left == 0",
        "",
    ),
    Mutant("revoked_grant_opens", "A1", _SENDER, " or grant.ticket in pair.tombstones:", ":"),
    Mutant(
        "notification_is_enough",
        "A15",
        _RECEIVER,
        " and self._evidence is Evidence.COMPLETION",
        "",
    ),
    Mutant("failed_write_is_clean", "A5", _ENDPOINT, "if is_proven and not gate.is_dirty else", "if is_proven else"),
    Mutant("unproven_drain_is_clean", "A15", _ENDPOINT, "return Drain.CLEAN if is_proven and", "return Drain.CLEAN if"),
    Mutant(
        "unpins_other_chunks",
        "A11",
        _SENDER,
        "        self._unpin(ticket, chunk)\n        return ticket\n",
        "        self._unpin(ticket, max(ticket.pins))\n        return ticket\n",
    ),
    Mutant(
        "first_look_is_final",
        "A15",
        _LANDINGS,
        "            if now < landing.give_up_at:\n",
        "            if False:\n",
    ),
    # completion and notification
    Mutant(
        "grant_not_repeated",
        "B1",
        _INTAKE,
        "room.state not in _UNANSWERED or",
        "room.state is not DecodeState.OFFERED or",
    ),
    Mutant(
        "offer_not_repeated",
        "B1",
        _INTAKE,
        "        else:\n            self._links.send(prefill, _offer(room, turn.now), turn)",
        "        elif room.repeat_gap_s == 1:\n            self._links.send(prefill, _offer(room, turn.now), turn)",
    ),
    Mutant("pages_in_other_order", "B2", _INTAKE, "tuple(list(pages) for pages", "tuple(list(pages)[::-1] for pages"),
    Mutant("dead_prefill_unnoticed", "B3", _SERVING, "if room.prefill == peer and room.state in _REMOTE:", "if False:"),
    Mutant(
        "dead_decode_unnoticed",
        "C1",
        _OUTFLOW,
        "        for room in [r for r in self.rooms.values() if r.peer == peer]:\n            self._end(room, turn)\n",
        "        for room in ():\n",
    ),
    Mutant("fenced_pins_stay", "C1", _OUTFLOW, "for ticket in self.sender.fenced(report.peer):", "for ticket in ():"),
    Mutant("parked_for_ever", "C1", _OUTFLOW, " and room.asks_again(turn.now):", " and False:"),
    # leaks, double frees, locks
    Mutant("pinned_pages_reused", "A11", _POOL, "        if self._pins:\n", "        if False:\n"),
    Mutant("locked_node_evicted", "C4", _TREE, "                self._order.remove(step)\n", "                pass\n"),
    Mutant(
        "released_node_forgotten",
        "C5",
        _TREE,
        "                    self._order.add(node)\n            node = parent",
        "                    pass\n            node = parent",
    ),
    Mutant(
        "lease_leaks",
        "C4",
        _BUDGET,
        "            self._cache.release(request.lease)\n            request.lease = None\n",
        "            request.lease = None\n",
    ),
    Mutant(
        "freed_under_a_step",
        "C11",
        _STEPS,
        "        if self.is_in_flight(request):\n            self._running.end_later",
        "        if False:\n            self._running.end_later",
    ),
    Mutant(  # at the commit of the step that ended it, while the next one reads and writes its pages
        "freed_under_the_next_step",
        "C11",
        _STEPS,
        "for request in [r for r in self._running.ending if not self.is_in_flight(r)]:",
        "for request in list(self._running.ending):",
    ),
    Mutant(
        "no_page_behind_a_step",
        "C11",
        _STEPS,
        "if lacks_page := self._running.decoding.lacking():",
        "if lacks_page := self._running.decoding.lacking()[:0]:",
    ),
    Mutant(
        "retracted_keeps_count",
        "D1",
        _RUNNING,
        "        self.give_back(request)\n        request.start_over()\n",
        "        self.give_back(request)\n",
    ),
    # deadlock, identity
    Mutant("attempts_from_1", "F2", _ROOMS, "Attempt(1 if former is None else former.attempt + 1)", "Attempt(1)"),
    Mutant(
        "resumed_keeps_its_attempt",
        "D1",
        _SERVING,
        "        room.attempt = Attempt(room.attempt + 1)\n        room.move(DecodeEvent.OFFER)\n",
        "        room.move(DecodeEvent.OFFER)\n",
    ),
    Mutant(
        "submit_taken_twice",
        "F1",
        _SERVING,
        "        if room.front != front or submit.epoch <= room.epoch:\n            return True\n",
        "        if room.front != front or submit.epoch <= room.epoch:\n            return False\n",
    ),
    Mutant(
        "lost_submit_waits",
        "B11",
        _FRONT,
        "            if live.placement is not None and live.may_be_lost(now, self._config.repeat_s):\n",
        "            if False:\n",
    ),
    Mutant("gap_in_the_stream", "B2", _LIFECYCLE, "        if run.start > live.num_tokens:", "        if False:"),
    Mutant(
        "worker_back_unnoticed",
        "B11",
        _LIFECYCLE,
        "        if not self._rooms.unplaced:\n",
        "        if True:\n",
    ),
    Mutant(
        "repeat_skips_a_token",
        "B2",
        _ENDED,
        "for first in range(start, token_len(self.output)",
        "for first in range(start + 1, token_len(self.output)",
    ),
    Mutant(
        "half_a_link",
        "F9",
        _LINKS,
        "case Reception.LEFT if received.peer.role != Role.FRONT.value:",
        "case Reception.LEFT if False:",
    ),
    Mutant("half_a_link_to_the_front", "F9", _WORKERS, "case Reception.LEFT, _:", "case Reception.LEFT, _ if False:"),
    Mutant("link_ends_without_fence", "A10", _ENDPOINTS, "        turn.do(FencePeer(name))\n", ""),
    Mutant(
        "corrupt_frame_accepted",
        "G2",
        _CODEC,
        'if zlib.crc32(payload).to_bytes(4, "little") != frame[3:HEADER_BYTES]:',
        "if False:",
    ),
    Mutant("frame_for_a_former_life", "F8", _HANDSHAKE, " and saying is not Saying.HELLO:", " and False:"),
    Mutant(
        "failed_attach_stays_ready",
        "F9",
        _LINKS,
        "        if isinstance(report, EndpointFailed):\n            self.lose(report.peer)\n            return\n",
        "        if isinstance(report, EndpointFailed):\n            return\n",
    ),
    # workers that come back elsewhere, or as something else
    Mutant(
        "refused_for_ever",
        "F8",
        _LINKS,
        "                self.send(peer.name, Heartbeat(), turn)  # its answer tells when it has been started anew\n",
        "                pass\n",
    ),
    Mutant(
        "greets_under_tickets",
        "F8",
        _ADDRESSES,
        "        if is_up and places.known:\n",
        "        if False:\n",
    ),
    Mutant("former_address", "F8", _WORKERS, "        worker.member = member\n", ""),
    # compatibility, hybrid state, tenancy
    Mutant(
        "uncomputed_page_cached",
        "G3",
        _RUNNING,
        "full = request.num_computed // page_size",
        "full = request.num_tokens // page_size",
    ),
    Mutant(
        "uncomputed_page_sent",
        "G3",
        _OUTFLOW,
        "end = ticket.prompt.num_closed(room.request.num_computed)",
        "end = ticket.prompt.num_closed(room.num_tokens)",
    ),
    Mutant("nan_is_cached", "G3", _STEPS, "        request.cache = CacheUse.BYPASS\n", ""),
    Mutant(
        "nan_of_an_early_chunk_is_cached",
        "B6",
        _STEPS,
        "            self._cache.poison(request.namespace, request.tokens, request.keys, sound)\n",
        "            pass\n",
    ),
    Mutant(
        "delta_from_zero",
        "G4",
        _SENDER,
        "return self.prompt.sources(self.cursors[pool], end)",
        "return self.prompt.sources(self.cursors[pool] - self.firsts[pool], end)",
    ),
    # pages of unequal sizes
    Mutant(
        "chunk_ends_inside_a_page_of_the_reader",
        "C13",
        _PROMPT_PAGES,
        "return num_computed // self.reader_size",
        "return -(-num_computed // self.reader_size)",
    ),
    Mutant(
        "prefix_counted_in_pages_of_the_writer",
        "C13",
        _PROMPT_PAGES,
        "start = first * self.reader_size // self.writer_size",
        "start = first",
    ),
    Mutant(
        "grant_read_in_pages_of_the_writer",
        "C13",
        _PROMPT_PAGES,
        "return -(-self.num_tokens // self.reader_size)",
        "return -(-self.num_tokens // self.writer_size)",
    ),
    Mutant(
        "last_page_checked_beyond_what_was_sent",
        "C13",
        _PROMPT_PAGES,
        "return -(-self.num_tokens // self.writer_size) * self.writer_size",
        "return -(-self.num_tokens // self.reader_size) * self.reader_size",
    ),
    Mutant(
        "keys_of_another_workers_pages",
        "T14",
        _ROOM_ORDERS,
        "keys=live.sample.keys.of(decode.fingerprint, decode.facts.page_size)",
        "keys=live.sample.keys.of(decode.fingerprint, 2 * decode.facts.page_size)",
    ),
    Mutant(
        "namespaces_mixed",
        "H10",
        _WAITING,
        "match = self._cache.match(request.namespace, request.tokens",
        'match = self._cache.match(Namespace(""), request.tokens',
    ),
    Mutant(
        "split_keeps_all_pages",
        "G4",
        _RADIX,
        "        node.pages = tuple(pages[-kept:] for pages in node.pages)\n        upper",
        "        upper",
    ),
    Mutant(
        "tokens_after_the_end",
        "H1",
        _LIFECYCLE,
        "        elif usage.output_len > live.num_tokens:\n",
        "        elif False:\n",
    ),
    # requests that fail though nothing has happened
    Mutant(
        "grant_counts_an_older_prefix",
        "I23",
        _INTAKE,
        "        self._take_lease(room)\n        missing = self._missing(room)\n",
        "        missing = self._missing(room)\n        self._take_lease(room)\n",
    ),
    Mutant(
        "prefix_hits_refused",
        "I23",
        _CHECKS,
        "if component.first < 0 or count < 0",
        "if component.first > 0 or count < 0",
    ),
    # memory that looks as good as ever, pools of unequal sizes
    Mutant(
        "second_pool_not_counted",
        "H3",
        _BUDGET,
        "return all(pool.num_free >= need for need, pool in zip(needs, self._pools, strict=True))",
        "return self._pools[0].num_free >= needs[0]",
    ),
    Mutant(
        "second_pool_not_made_for_a_grant",
        "H3",
        _INTAKE,
        "self._parts.budget.make_room(needs):",
        "self._parts.budget.make_room((needs[0], *[0 for _ in needs[1:]])):",
    ),
    Mutant(
        "pages_of_the_first_pool_sent",
        "H3",
        _OUTFLOW,
        "sources = ((PoolId(pool), ticket",
        "sources = ((PoolId(0), ticket",
    ),
    # lifetimes
    Mutant(
        "window_given_up_early",
        "H3",
        "deltaserve.core.lifetime",
        "return max(0, num_tokens + 1 - (self.window_len or 1)) // page_size",
        "return max(0, num_tokens + 1 + page_size - (self.window_len or 1)) // page_size",
    ),
    Mutant(
        "tail_taken_for_leased",
        "H3",
        _INTAKE,
        "if lease is not None and lease.first_page(pool) < lease.num_pages:",
        "if lease is not None:",
    ),
    Mutant(
        "hit_without_a_state",
        "H3",
        _TREE,
        "for tail in self._tails)\n            if shorter",
        "for tail in self._tails[:1])\n            if shorter",
    ),
    Mutant(
        "leaf_grows_past_its_state",
        "G3",
        _TAILS,
        "        if not leaf.pages[self.index]:\n            return True\n",
        "        if num_handed_over == 0 or not leaf.pages[self.index]:\n            return True\n",
    ),
    Mutant(
        "trimmed_leaf_keeps_its_state",
        "G3",
        _RADIX,
        "leaf.pages = tuple(pages[:-cut] for pages in leaf.pages)",
        "leaf.pages = tuple(pages[:-cut] or pages[:1] for pages in leaf.pages)",
    ),
    Mutant(
        "donated_slot_is_still_written",
        "H3",
        _RUNNING,
        "request.own_state(pool, slots[pool][0])",
        "request.own_state(pool, request.lease.pages(pool)[-1] if request.lease else slots[pool][0])",
    ),
    Mutant(
        "source_of_a_hit_is_not_leased",
        "H3",
        _TAILS,
        "        needed = min(self._retention.first_seen(num_tokens, self._page_size), node.end)\n",
        "        needed = node.end\n",
    ),
    Mutant(
        "nobody_yields_a_slot_of_a_state",
        "H3",
        _BUDGET,
        "if self.available(PoolId(p)) < need + left)",
        "if p < 2 and self.available(PoolId(p)) < need + left)",
    ),
    Mutant(
        "convolution_cut_contiguously",
        "T3",
        _PLAN,
        "        return cls(group.blocks, group.page_len(page_size), group.dtype, num_ranks)\n",
        "        blocks = group.blocks\n"
        "        if len(blocks) > 1:\n"
        "            blocks = (HeadBlock(blocks[0].num_heads, blocks[0].num_rows, sum(b.row_width for b in blocks)),)\n"
        "        return cls(blocks, group.page_len(page_size), group.dtype, num_ranks)\n",
    ),
    Mutant(
        "state_filed_where_its_step_began",
        "H3",
        _STEPS,
        "last = (item.q_start + item.q_len - 1) // self._running.config.page_size",
        "last = item.q_start // self._running.config.page_size",
    ),
    Mutant(
        "state_told_only_after_it_moved",
        "H3",
        _STEPS,
        "pages=(*self._page_updates(), *self._move_states(items)),",
        "pages=tuple(self._move_states(items) or self._page_updates()),",
    ),
    # what operators ask for, and what is done where nothing can be fenced
    Mutant(
        "flush_takes_what_requests_hold",
        "C4",
        _CORE,
        "                self.parts.cache.clear()\n",
        "                for request in self.serving.requests():\n"
        "                    self.parts.budget.reclaim(request)\n"
        "                self.parts.cache.clear()\n",
    ),
    Mutant(
        "ranking_forgets_the_urgent",
        "D1",
        "deltaserve.control.sched.queue",
        "return chain(urgent, self._by_turns(",
        "return chain(self._by_turns(",
    ),
    Mutant(
        "quarantine_has_no_age",
        "A6",
        _RECEIVER,
        "0.0 if oldest is None else now - oldest.revoked_at",
        "0.0",
    ),
    # another role over the same memory
    Mutant("new_role_under_the_old_boot", "B1", _CORE, "role=self._change.role, boot=boot,", "role=self._change.role,"),
    Mutant(
        "new_role_while_rooms_are_there", "C1", _CORE, "scheduler.is_idle and not self.num_rooms", "scheduler.is_idle"
    ),
    Mutant(
        "another_role_is_another_model",
        "G1",
        _OWN_HELLO,
        "reason = FailReason.INCOMPATIBLE if differences else FailReason.NO_PEER",
        "reason = FailReason.INCOMPATIBLE",
    ),
    # what is asked for besides tokens
    Mutant(
        "first_token_without_logprobs",
        "H1",
        _OUTFLOW,
        "                logprobs=sampled.logprobs,\n                cached_len=",
        "                cached_len=",
    ),
    Mutant(
        "stop_id_before_min_tokens",
        "H1",
        "deltaserve.control.sched.ending",
        "output_len > sampling.min_tokens",
        "output_len >= sampling.min_tokens",
    ),
    Mutant(
        "prompt_logprobs_of_a_hit",
        "H1",
        _WAITING,
        "matches = self._running.shares_prompt(request)",
        "matches = self._running.uses_tree(request)",
    ),
    # endings: by the deadline, of one answer, on one worker
    Mutant(
        "deadline_passed_unseen",
        "I24",
        _FRONT,
        "deadline = now + generation.deadline_s\n",
        "deadline = now + generation.deadline_s + 5.0\n",
    ),
    Mutant(
        "moves_a_silent_room",
        "I25",
        _FRONT,
        "                live.num_repeats += 1\n                self._lifecycle.resume(live, now)\n",
        "                live.num_repeats += 1\n                self._lifecycle.retry(live, Cause.DECODE, now)\n",
    ),
    # load that goes on while one process is in trouble, several fronts, slow networks
    Mutant(
        "stalled_by_those_behind",
        "B2",
        _WAITING,
        "self.holders.youngest_but if is_next else",
        "self.holders.youngest_but if False else",
    ),
    Mutant(
        "ends_rooms_of_other_fronts", "B7", _SERVING, "            elif room.front == peer:\n", "            else:\n"
    ),
    Mutant(
        "drain_time_ignores_progress",
        "I27",
        _RECEIVER,
        "ticket.heard_at, ticket.bytes_outstanding = now, bytes_outstanding",
        "ticket.bytes_outstanding = bytes_outstanding",
    ),
    Mutant(
        "one_full_worker_stalls_all",
        "D2",
        _OUTFLOW,
        "self._ungranted.get(room.peer, 0) < self._horizon",
        "sum(self._ungranted.values()) < self._horizon",
    ),
    Mutant("fences_again", "A10", _SERVING, "        self.receiver.fencing(peer)\n", ""),
    Mutant(
        "kept_logprobs_miscounted",
        "C1",
        "deltaserve.control.engine.kept_logprobs",
        "self.num_numbers -= _num_numbers(told.frames.popleft())",
        "told.frames.popleft()",
    ),
    Mutant("lost_prompt_logprobs_wait", "B4", _LIFECYCLE, "elif not live.has_prompt_logprobs:", "elif False:"),
    # ranks of a worker
    Mutant("one_rank_has_sent", "T7", _RANKS, "        if chunk.waiting:\n", "        if False:\n"),
    Mutant("one_rank_has_drained", "A3", _RANKS, "        if ticket.undrained:\n", "        if False:\n"),
    Mutant("one_rank_has_fenced", "A12", _RANKS, "        if fence.waiting:\n", "        if False:\n"),
    Mutant("one_rank_verifies", "T7", _RANKS, "        if check.waiting:\n", "        if False:\n"),
    Mutant(
        "one_pair_covers",
        "T7",
        _COVERAGE,
        "        return self._num_incomplete == 0\n",
        "        return self._num_incomplete < len(self._of_pair)\n",
    ),
    Mutant(
        "writers_by_ratio",
        "T3",
        _PLAN,
        "RankPair(w, r) for r in range(self.num_readers) for w in self.writers_of(r)",
        "RankPair(w, r) for r in range(self.num_readers) for w in range(max(1, self.num_writers // self.num_readers))",
    ),
    Mutant(
        "replica_answers_nothing",
        "B10",
        _ENDPOINT,
        "            return [self._sent(link, gate, command, 0)]\n",
        "            return []\n",
    ),
    Mutant(
        "ranks_report_of_old_greeting",
        "E1",
        _RANKS,
        "if opening is not None and opening.number == number else None",
        "",
    ),
    Mutant(
        "fence_keeps_what_ranks_verify",
        "C1",
        _RANKS,
        "            del self._checks[key]  # where",
        "            pass  # where",
    ),
    Mutant(
        "fence_keeps_what_ranks_owe",
        "E1",
        _RANKS,
        "            del self._tickets[key]\n        for key",
        "            pass\n        for key",
    ),
    Mutant(
        "one_pair_brings_the_end",
        "T7",
        _COVERAGE,
        "            self._num_incomplete -= of_pair.is_complete\n",
        "            self._num_incomplete -= of_pair.is_complete or done.is_last\n",
    ),
    Mutant(
        "entries_of_ranks_not_compared",
        "E1",
        _CHAIN,
        "        if checksum != expected.checksum:\n",
        "        if False:\n",
    ),
    Mutant(
        "entry_lost_to_a_rank_or_swapped",
        "E1",
        _CHAIN,
        "        expected = self._taken.then(body)\n",
        "        expected = LogPosition(number, checksum)\n",
    ),
    Mutant(
        "only_the_first_rank_is_told",
        "E1",
        _RANKS,
        "        return [command for _ in self._ranks]\n",
        "        return [command, *(None for _ in self._ranks[1:])]\n",
    ),
    Mutant(
        "replication_by_modulo",
        "T3",
        "deltaserve.core.layout.shard",
        "    return range(first, first + replicas)\n",
        "    return range(head, size, num_heads) if replicas > 1 else range(first, first + 1)\n",
    ),
    # staging memory
    Mutant(
        "scatter_after_done",
        "T7",
        _STAGED_READER,
        "            if moved is None:\n"
        "                self._end(lease)\n"
        "                self._scattered(key, came.data, heard)\n",
        "            if self.ring.lease_of(key) is not None:\n"
        "                self.ring.give_back(key)\n"
        "                self._scattered(key, came.data, heard)\n"
        "            if moved is None:\n"
        "                self._forget(lease)\n",
    ),
    Mutant(
        "staged_lease_leaks",
        "T20",
        _STAGED_READER,
        "        self._forget(lease)\n        self.ring.give_back(lease.key)\n",
        "        self._forget(lease)\n",
    ),
    Mutant(
        "buffer_freed_at_the_post",
        "T8",
        _STAGED_WRITER,
        '            here.counters["staged_bytes"] += window.num_bytes\n',
        "            self._free_buffer(write)\n",
    ),
    Mutant("mark_moves_back", "T10", _RING, "RingPosition(start.round + 1, 0)", "RingPosition(start.round, 0)"),
    Mutant(
        "plan_beyond_the_grant",
        "T7",
        "deltaserve.control.transfer.staged_grants",
        "covered[place] != tuple(map(PageId, pages))",
        "len(covered[place]) != len(pages)",
    ),
    Mutant(
        "ring_lease_returned_early",
        "T7",
        _STAGED_READER,
        "            if moved is None:\n                self._end(lease)\n",
        "            if self.ring.lease_of(key) is not None:\n"
        "                self.ring.give_back(key)\n"
        "            if moved is None:\n"
        "                self._forget(lease)\n",
    ),
    Mutant(
        "done_when_written",
        "T7",
        _STAGED_WRITER,
        "if write.state is not StagedWriteState.DONE:",
        "if write.state not in (StagedWriteState.DONE, StagedWriteState.WRITTEN):",
    ),
    Mutant(
        "waits_outlive_a_fence",
        "T20",
        _STAGED_READER,
        "in [key for key in self.ring.waiting() if key.peer == peer]",
        "in [key for key in self.ring.waiting() if False]",
    ),
    Mutant("staged_wait_has_no_end", "T11", _RING, "return now >= wait.since + self._patience_s or", "return"),
    Mutant(
        "ring_reaches_into_the_oldest",
        "T10",
        _RING,
        "(self._ranges and self._reaches_into(lease, self._ranges[0]))",
        "False",
    ),
    Mutant(
        "refused_lease_is_lent_again_unfenced",
        "A20",
        _STAGED_READER,
        "        self._move(lease, StagedLeaseEvent.KEEP)\n        self._came.pop(lease.key, None)\n",
        "        self.ring.give_back(lease.key)\n"
        "        del self._leases[lease.key]\n"
        "        self._came.pop(lease.key, None)\n",
    ),
    Mutant(
        "announced_bytes_are_scattered_unread",
        "A20",
        _STAGED_READER,
        "if self._here.memory.checksum(came.data.offset, came.num_bytes) == came.data.checksum:",
        "if True:",
    ),
    Mutant("late_ask_keeps_a_lease", "T20", _STAGED_WRITER, "case StageLease():  # the", "case None:  # the"),
    Mutant(
        "reserved_lease_outlives_its_ticket",
        "T9",
        _ENDPOINT,
        "        gate.is_open = False\n        gate.drop_jobs()\n        self._reserve_no_more(gate)\n",
        "        gate.is_open = False\n        gate.drop_jobs()\n",
    ),
    # readers that copy
    Mutant(
        "epoch_unread_after_the_copy",
        "A12",
        _LOOPBACK,
        "write.is_void = write.payload is None and not write.near.stands(self.now)",
        "write.is_void = False",
    ),
    Mutant("fence_raises_no_epoch", "A12", _LOOPBACK, "            endpoint.over_at = self.now\n", ""),
    Mutant(
        "epoch_raised_after_the_fence",
        "A12",
        _LOOPBACK,
        "endpoint.over_at = self.now\n",
        "endpoint.over_at = self.now + 10.0\n",
    ),
    # guesses at the next tokens
    Mutant(
        "wrong_guess_counts_as_computed",
        "S1",
        _STEPS,
        "request.num_in_state = planned.q_start + planned.num_known + num_right\n",
        "request.num_in_state = planned.q_start + planned.q_len\n",
    ),
    Mutant(
        "stop_inside_a_round_is_overrun",
        "S2",
        _SPECULATION,
        "if not is_right or finish_of(params, first_output + place + 1, sampled.token) is not None:",
        "if not is_right:",
    ),
    Mutant("state_is_not_stepped_back", "S3", _STEPS, "self._running.step_back(request)", "pass"),
    Mutant(
        "guess_without_a_page",
        "S4",
        _TOKEN_SHARES,
        "chosen[request] = min(num_drafts, running.needs.room_behind(request))",
        "chosen[request] = num_drafts",
    ),
    # workers that share experts
    Mutant(
        "idle_member_skips_the_exchange",
        "E1",
        _ROUNDS,
        "return RoundPart.NONE if has_begun and self._is_resting else None",
        "return None",
    ),
    Mutant(
        "member_never_says_that_it_rests",
        "E1",
        _ROUNDS,
        "        self._is_resting = True\n\n    def next_part",
        "        pass\n\n    def next_part",
    ),
    # situations that were drawn and never met
    Mutant(
        "last_rank_says_how_it_ended",
        "A5",
        _RANKS,
        "        if report.outcome is Drain.DIRTY:\n            ticket.outcome = Drain.DIRTY\n",
        "        ticket.outcome = report.outcome\n",
    ),
    Mutant(
        "middle_windows_shift",
        "G4",
        _STAGING,
        "            windows.append(StagedWindow(region, tuple(part.pages(first, first + pages) for part in parts)))\n",
        "            at = first - (0 < first < num_pages - pages)\n"
        "            windows.append(StagedWindow(region, tuple(part.pages(at, at + pages) for part in parts)))\n",
    ),
    Mutant(
        "windows_all_carry_the_first_pages",
        "G4",
        _STAGING,
        "tuple(part.pages(first, first + pages) for part in parts)",
        "tuple(part.pages(0, pages) for part in parts)",
    ),
    Mutant(
        "earlier_life_is_believed",
        "F8",
        _TABLE,
        "is_earlier = peer.boot is not None and boot < peer.boot",
        "is_earlier = False",
    ),
    # who drives an engine
    Mutant("actions_out_of_order", "D2", _DRIVER, "[*self.engine.turn(now)]", "[*reversed(self.engine.turn(now))]"),
    Mutant("successor_keeps_the_boot", "D3", _DRIVER, "        self._boot = self._next_boot(self._boot)\n", ""),
    Mutant("rest_is_not_told", "D5", _DRIVER, "if not self._plans and not self._is_resting:", "if False:"),
    Mutant("open_ticket_is_not_told", "D6", _DRIVER, "yield Polling(is_active)", "yield Polling(is_active=False)"),
    # how a transfer thread works
    Mutant("orders_out_of_order", "D7", _TURNS, "for order in orders:", "for order in reversed(orders):"),
    Mutant(
        "sleeps_while_a_ticket_is_open",
        "D6",
        _TURNS,
        "return self._is_active or not self._plane.is_idle()",
        "return not self._plane.is_idle()",
    ),
    Mutant(
        "report_reduced_twice",
        "D8",
        _RANK_PLANE,
        "reports += self._reduce(other.rank, self._hear(other, now))",
        "reports += self._reduce(other.rank, self._reduce(other.rank, self._hear(other, now)))",
    ),
    Mutant(
        "own_report_not_reduced",
        "D8",
        _RANK_PLANE,
        "reports = self._reduce(0, self._own.poll(now))",
        "reports = self._own.poll(now)",
    ),
    Mutant(
        "answers_of_ranks_not_waited_for",
        "D6",
        _RANK_PLANE,
        "return self._own.is_idle() and all(other.is_idle and not other.owes_answer for other in self._others)",
        "return self._own.is_idle()",
    ),
    Mutant(
        "ranks_do_not_hear_of_an_open_ticket",
        "D6",
        _RANK_PLANE,
        "            self._tell(other, Polling(is_active), now)\n",
        "            pass\n",
    ),
    # work without end
    Mutant(
        "heartbeats_without_a_pause",
        "F9",
        _METER,
        "self._next_beat = now + self._heartbeat_s",
        "self._next_beat = now + self._heartbeat_s / 20",
    ),
    # grammars
    Mutant(
        "matcher_is_not_replayed",
        "X1",
        _GRAMMAR_REPLAY,
        'self._matcher, self._consumed = self._start(), b""',
        "self._matcher, self._consumed = self._start(), output",
    ),
    Mutant("matcher_keeps_wrong_guesses", "X2", _GRAMMAR_REPLAY, "return matcher.rollback(num_back)", "return True"),
    Mutant(
        "row_counts_its_output_as_prompt",
        "X3",
        _RUNNING,
        "bytes(request.tokens), request.prompt_len, start)",
        "bytes(request.tokens), request.num_tokens, start)",
    ),
    Mutant(
        "offer_tells_output_as_prompt",
        "X4",
        _INTAKE,
        "        prompt_len=request.prompt_len,\n",
        "        prompt_len=request.num_tokens,\n",
    ),
    Mutant(
        "delivered_output_is_prompt",
        "X5",
        _ROOM_ORDERS,
        "        prompt_len=live.prompt_len,\n",
        "        prompt_len=live.prompt_len + len(live.output),\n",
    ),
    Mutant("room_for_one_that_leaves", "M1", _WORKER, " and self.leaves_at is None\n", "\n"),
    Mutant(
        "leaves_without_draining",
        "M2",
        _LIFECYCLE,
        "            if not self._rooms.named(worker.name):",
        "            if True:",
    ),
    Mutant("grace_without_end", "M2", _LIFECYCLE, "if now < worker.leaves_at or self", "if True or self"),
    Mutant(
        "rooms_leave_and_stay",
        "M2",
        _LIFECYCLE,
        "        self._orders.withdraw(live, FailReason.CANCELLED, now)\n        self._counts[",
        "        self._counts[",
    ),
    Mutant("other_ends_are_not_heard_of", "F9", _LINKS, "message.ends != digest(greeting.theirs.ends)", "False"),
    Mutant("one_that_left_is_known_to_decode", "M3", _LINKS, "if name not in known]", "if False]"),
    Mutant(
        "one_that_left_is_dialled",
        "M3",
        _WORKERS,
        "        self._emit(HangUp(worker.name))\n        self._reconsider()\n        self._tell_decodes()\n",
        "        self._reconsider()\n        self._tell_decodes()\n",
    ),
    Mutant("joins_and_leaves_all_the_same", "M4", _WORKERS, "        worker.leaves_at = None\n", ""),
    Mutant(
        "joins_twice",
        "M5",
        _WORKERS,
        "        if worker is None:\n            worker = self._workers[name] =",
        "        if True:\n            worker = self._workers[name] =",
    ),
    # two revisions of a model
    Mutant(
        "pair_of_two_revisions",
        "V1",
        _POOLS,
        "pools.setdefault(worker.revision, Pool(worker.revision))",
        'pools.setdefault(Revision("", ""), Pool(worker.revision))',
    ),
    Mutant(
        "peers_of_another_revision",
        "V2",
        _WORKERS,
        "if w.revision == decode.revision and w.role is Role.PREFILL)",
        "if w.role is Role.PREFILL)",
    ),
    Mutant(
        "keys_of_another_model",
        "V3",
        _KEYS,
        "        keys = self._chains.get((fingerprint, page_size))\n",
        "        keys = next((keys for (_, size), keys in self._chains.items() if size == page_size), None)\n",
    ),
    Mutant(
        "goes_on_in_another_revision",
        "V4",
        _STREAMS,
        "return self.revision is None or self.revision == revision",
        "return True",
    ),
    Mutant(
        "next_prefill_of_another_revision",
        "V1",
        _PLACING,
        "[w for w in self._workers.pool(decode.revision).prefills if",
        "[w for pool in self._workers.pools() for w in pool.prefills if",
    ),
    Mutant(
        "former_revision_is_believed",
        "V5",
        _WORKERS,
        "        worker.revision = revision_of(hello)\n",
        "        worker.revision = worker.revision or revision_of(hello)\n",
    ),
    Mutant(
        "resumes_with_an_exchanged_prefill",
        "V1",
        _WORKERS,
        "if prefill is None or self._workers[prefill].revision != self._workers[decode].revision:\n",
        "if prefill is None:\n",
    ),
    Mutant(
        "let_go_and_not_told",
        "A6",
        _LINKS,
        "            case Reception.LEFT if received.peer.role != Role.FRONT.value:",
        "            case Reception.LEFT if is_dialled:",
    ),
    Mutant(
        "cores_are_never_taken_back",
        "D7",
        _DRIVER,
        "            times.append(self._waits_until)\n",
        "            pass\n",
    ),
    Mutant("cores_left_for_ever", "D7", _SERVING, "0 if states[DecodeState.STARTED] else sum", "sum"),
    # answers that return
    Mutant("answer_unverified", "W1", _BACK_READER, "            if verification is None:\n", "            if True:\n"),
    Mutant("answer_behind_a_gap", "W2", _BUDGET, "        if match.reach < first_len:\n", "        if False:\n"),
    Mutant(
        "answer_of_another_namespace",
        "W3",
        _BACK_READER,
        "namespace = Namespace(told.namespace)",
        'namespace = Namespace("")',
    ),
    Mutant(
        "pull_of_another_namespace",
        "W3",
        _BACK_READER,
        "path = _Path(room, attempt, request.namespace, tokens, keys)",
        'path = _Path(room, attempt, Namespace(""), tokens, keys)',
    ),
    Mutant(
        "a_pull_is_waited_for_for_ever",
        "C1",
        _BACK_READER,
        "        if fill is None or now >= fill.since + _WAIT_S:\n            return False\n",
        "        if fill is None:\n            return bool(self._num_pulls)\n",
    ),
    Mutant(
        "grant_outlives_its_link",
        "W4",
        _BACK_READER,
        "for fill in [fill for fill in self._fills.values() if fill.peer == peer]:",
        "for fill in []:",
    ),
    Mutant(
        "answer_outlives_its_link",
        "W4",
        _OUTFLOW,
        "            self._close(ticket, turn)  # of an answer that it had asked for\n",
        "            pass\n",
    ),
    Mutant(
        "answer_awaited_for_ever",
        "C1",
        _BACK_READER,
        "            if turn.now >= (fill.since + _REPEAT_S if is_short else fill.since + _LASTS_S):\n",
        "            if False:\n",
    ),
    Mutant(
        "other_pages_of_the_answer",
        "W5",
        _BACK_WRITER,
        "return self.pages[indexes.start - self.first : indexes.stop - self.first]",
        "return self.pages[: len(indexes)]",
    ),
    Mutant(
        "evicted_answer_is_sent",
        "W5",
        _BACK_WRITER,
        "        if match.num_tokens < path.num_tokens:\n",
        "        if not match.num_tokens:\n",
    ),
    Mutant(
        "fenced_by_its_answer_alone",
        "A6",
        _CORE,
        "            self._drop_peer(fenced, FailReason.PEER_FENCED, turn)\n",
        "            pass\n",
    ),
    # a file under the tree
    Mutant("slot_reused_while_read", "H1", _TIER, " if slot not in self._pins), None)", "), None)"),
    Mutant(
        "found_before_stored",
        "H2",
        _TIER,
        "            self._writing[slot] = key\n",
        "            self._writing[slot], self._stored[key] = key, slot\n",
    ),
    Mutant("half_a_slot_is_believed", "H3", _SEAL, "return bytes(header) == self.header(key, parts)", "return True"),
    Mutant("loaded_behind_a_gap", "H4", _BUDGET, "        if match.reach < first_len:\n", "        if False:\n"),
    Mutant(
        "load_of_another_namespace",
        "H5",
        _TIERING,
        "enter_tree(load.request.namespace, ",
        'enter_tree(type(load.request.namespace)(""), ',
    ),
    Mutant(
        "stored_while_it_changes",
        "H6",
        _TIERING,
        "                    self._pools[copy.pool].pin((copy.page,))\n",
        "                    pool = self._pools[copy.pool]\n"
        "                    pool.pin((copy.page,)), pool.unpin((copy.page,)), setattr(pool, 'unpin', len)\n",
    ),
    Mutant("poison_stays_in_the_file", "H7", _TREE, "            self._newcomers.poisoned()\n", "            pass\n"),
    Mutant("void_load_is_used", "H7", _TIERING, "        if load.is_void or not num_good", "        if not num_good"),
    Mutant("load_is_kept", "C1", _TIERING, "            self._budget.free(load.pages)\n", ""),
    Mutant("half_a_load_of_windows", "H3", _TIERING, " or (stretch.has_tails and num_good < len(load.copies)):", ":"),
    Mutant("windows_of_an_evicted_path", "H6", _TREE, "_newcomers.path_gone(keys)", "_newcomers.gone(_FULL, keys)"),
    Mutant(
        "evicted_window_is_stored",
        "H6",
        _TAILS,
        "            self._newcomers.gone(self.index, ",
        "            len(",
    ),
    # hints
    Mutant("hints_untold", "C4", _ROOMS, "            hints=self.hints,\n", ""),
    Mutant("done_above_what_stays", "C4", _EVICTION, " and self._all_done(step.children.values()):", ":"),
    Mutant("done_while_leased", "C1", _EVICTION, " and not step.locks and not step.shared", " and not step.shared"),
    Mutant(
        "done_lease_ends_twice",
        "C1",
        _BUDGET,
        "            request.lease = None\n            self._cache.retire(lease)\n",
        "            self._cache.retire(lease)\n",
    ),
    Mutant(
        "kept_by_a_tenant_without_bound",
        "C4",
        _RETENTION,
        "        return min(self._most_of_all - num_others, self._most_of_one)\n",
        "        return self._most_of_all - num_others\n",
    ),
    Mutant(
        "kept_below_what_goes",
        "C4",
        _RETENTION,
        "            self.keep(upper, self._ends.until[node])\n",
        "            pass\n",
    ),
    Mutant("kept_for_ever", "C4", _CORE, "        self.parts.cache.tell_time(now)\n", ""),
    Mutant(
        "done_is_not_taken_back",
        "C4",
        _EVICTION,
        "            del self._done[node]\n            self._rest.add(node)\n",
        "            self._rest.add(node)\n",
    ),
)
