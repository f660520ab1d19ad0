"""Situations that docs/reliability.md says simulated runs contain, beside faults and cells: each is counted, none is
taken on trust.

A situation counts once in a run. `least` is how many of 10,000 runs must have it, a third or less of what was measured:
`deltaserve sim faults --gates` names each that falls below, and so tells when a change of sizes or rates has put
something out of reach.
"""

from enum import Enum

RUNS_PER_RATE = 10_000


class Situation(Enum):
    """(In words, least number of 10,000 runs that have it)."""

    # the cluster and its model
    TWO_PREFILL = "two prefill workers", 1400
    TWO_DECODE = "two decode workers", 1300
    TWO_FRONTS = "two fronts", 500
    UNIFIED = "a unified worker beside them", 150
    WINDOWED_LAYERS = "a model with windowed layers", 2000
    RECURRENT_LAYERS = "a model with recurrent layers", 900
    SMALLEST_POOL = "a pool of the largest request alone", 600
    FEWEST_SLOTS = "as few recurrent states as one request takes", 300
    PAGES_OF_ONE_TOKEN = "pages of one token", 400
    PAGES_OF_64_TOKENS = "pages of 64 tokens", 500
    SEVERAL_SAMPLES = "requests of several samples", 1500
    THREE_NAMESPACES = "three namespaces", 800
    LOGPROBS_ASKED = "log-probabilities are asked for", 1200
    PROMPT_LOGPROBS_ASKED = "log-probabilities of a prompt are asked for", 1300
    STOP_IDS_ASKED = "stop ids are named", 1300
    GRAMMAR_ASKED = "an answer by a grammar is asked for", 1000
    GRAMMAR_RESUMED = "a row with a grammar begins behind output", 500
    WITHOUT_PREFILL = "decode computes a prompt as no prefill worker is there", 150
    # kinds of runs
    CALLERS = "callers that ask again as soon as they are answered", 80
    SICK_WORKER = "a worker is the only process that anything befalls", 70
    SICK_FRONT = "a front is the only one", 13
    CROWDED = "a decode worker takes seconds for an answer, beside a quick one", 20
    NO_TROUBLE = "nothing befalls workers and links", 400
    NO_TROUBLE_UNPROVEN = "the same, where completions prove nothing", 50
    SLOW_WRITES = "writes take most of a second, and nobody may be fenced", 20
    SLOW_LINKS = "control connections that carry few bytes a second", 400
    SLOW_CARDS = "network cards that carry few bytes a second", 500
    SPOILED_ASKED_AGAIN = "a prompt that was spoiled is asked again", 150
    # processes
    FRAME_FOR_ANOTHER_LIFE = "a frame names another life of its addressee", 500
    LATE_LIFE = "a frame of an earlier life comes behind one of a later", 30
    THREE_LIVES = "frames of three lives of a process are on their way to one peer", 12
    WRITES_OF_THE_DEAD = "bytes land whose writer has ended", 25
    FENCED_BYTES = "bytes arrive whose endpoint was fenced", 300
    SLOW_FENCE = "a fence takes a while", 150
    ROLE_CHANGED = "a worker takes up another role", 140
    SEVERAL_EVENTS = "a turn of a worker deals with several events", 300
    LEFT = "a worker leaves, and every front forgets it", 270
    LEAVES_WITH_ROOMS = "a worker that has rooms is to leave", 180
    JOINED = "a worker that had left joins again", 220
    TWO_REVISIONS = "two revisions serve side by side", 100
    ROLLED_OUT = "the last worker of a revision has left, and another one serves", 50
    # readers that copy
    READER_COPIES = "a reader copies, as on one machine", 400
    COPIED_AFTER_FENCE = "a stopped reader goes on and copies behind its writer's fence", 40
    # completions that prove nothing
    UNPROVEN = "completions prove nothing", 400
    ACKNOWLEDGED = "the same, but they come behind the bytes", 250
    UNPOISONED = "memory that changes hands looks as good as ever", 1100
    LOOKED_AGAIN = "announced pages are not right yet and are looked at again", 25
    # memory
    RETRACTED = "a running request gives its memory to another", 50
    STALLED = "a prompt that does not fit stalls the queue", 140
    STATE_RECOUNTED = "a recurrent state in a tree is compared with its tokens", 500
    UNEQUAL_PAGES = "pages of unequal sizes on the two sides", 250
    # a file under the tree
    TIERED = "a worker has a file under its tree", 400
    LOADED = "pages come back from it", 90
    LOAD_FAILED = "a slot does not hold what it should", 20
    # answers that return
    WRITTEN_BACK = "pages of an answer land on prefill", 450
    WRITE_BACK_REVOKED = "prefill withdraws what it granted for an answer", 40
    NOT_WORTH_IT = "pages of an answer are not worth their way back", 10
    # where a prompt is computed
    NEAR = "decode computes a prompt as that is sooner", 500
    NEAR_ON_SHARED_CORES = "the same, on cores that are prefill's too", 200
    PULLED = "prefill asks decode for pages of a prompt", 170
    # hints
    HINTED_DONE = "a client says that no further turn comes", 1000
    HINTED_RETAIN = "a client asks to keep a path for a while", 500
    HINTED_PREFETCH = "a client has a prompt made ready", 660
    # order of waiting requests
    BY_PRIORITY = "waiting requests are taken by priority", 290
    # steps
    STEP_AHEAD = "a step is planned while another computes", 500
    STEP_BEHIND_PROMPTS = "a step is planned while another computes prompts", 200
    STEP_PUT_OFF = "a step that only decodes is put off while prefill has the cores", 40
    READ_NOT_FINITE = "KV that is not finite is read", 150
    OTHER_TOKEN = "a token that is computed anew may differ from what it was", 1200
    GUESSES = "guesses at the next tokens are verified", 800
    # ranks
    TWO_RANKS = "workers of two ranks", 400
    FOUR_RANKS = "workers of four ranks", 300
    REPLICATED_HEADS = "more ranks than heads", 250
    RANKS_APART = "ranks are behind the first", 300
    CLEAN_LAST_WORD = "a dirty drain whose last rank says clean", 12
    RANK_OUTLIVES_WORKER = "a rank takes a turn behind its worker's end", 40
    RANK_MEETS_NEXT_LIFE = "the same, when the next life is there", 15
    ENTRY_LOST = "an entry of the log between ranks is lost", 20
    ENTRY_SWAPPED = "the same is swapped with the next", 20
    ENTRY_EXCHANGED = "the same is exchanged for another", 20
    # staging memory
    STAGED = "a write goes by way of staging memory", 200
    STAGED_UNPROVEN = "the same, and completions prove nothing", 40
    SEVERAL_WINDOWS = "a staged chunk is cut into several windows of a pool", 120
    MIDDLE_WINDOWS = "the same, into three or more", 50
    STAGING_ON_ONE_SIDE = "only one side has staging memory", 30
    STAGING_WAIT = "somebody waits for staging memory", 60
    STAGED_DIRECTLY = "a staged write goes directly in the end", 30
    SLOW_GATHERS = "gathers and scatters take a while", 200
    # expert groups
    EXPERT_GROUP = "decode workers share experts", 140
    IDLE_MEMBER = "an idle member joins a round", 140
    MEMBER_WAITED_FOR = "a round waits for a member that is stopped or not there", 11
    GROUP_ENDS = "a member ends, and the others with it", 11

    def __init__(self, words: str, least: int) -> None:
        self.words = words
        self.least = least


class Sightings(set[Situation]):
    """Situations that a run has met."""

    def note(self, situation: Situation, holds: bool = True) -> None:
        if holds:
            self.add(situation)
