"""The words of specpipe as values: what services say to one another and what a request is made of.

Owns: frozen dataclasses and enums shared by coordinator, draft worker and target worker.
Must not know: torch, gRPC, protobuf, clocks. `specpipe.codec` turns these into protobuf messages and back.

Positions count from 0 at the prompt's first id. `base` is the number of committed tokens (prompt included) that an
extension or a commit starts from. Durations are milliseconds measured on one host; clock readings never travel.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from specpipe.errors import ErrorCode
from specpipe.reports import Report

MAX_LABEL_CHARS = 256
"""Of a request's id in a line of a log: all that a coordinator lets through."""


class Mode(enum.Enum):
    """How a request is speculated for (README.md, "What is promised")."""

    OFF = "off"
    SYNC = "sync"
    PIPELINED = "pipelined"


class Rule(enum.Enum):
    """How a drafted token is accepted (docs/decisions/0002)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class Origin(enum.Enum):
    """Where a committed token came from.

    ACCEPTED: a drafted node on the walked path. RECOVERED: the target's own choice where it differed from every
    verified child. BONUS: its choice after a path accepted to its last verified node. PLAIN: its choice in a round
    that verified no node.
    """

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """All resolved: the seed is always present once a session is open."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]; 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # in [0, 1]; 0: off
    seed: int = 0  # unsigned 64-bit
    choice: int = 0  # index of this choice among the n of a request; each has noise of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Token rules, applied by the target worker inside a commit. Lengths are absolute (prompt included)."""

    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # eos_token_ids do not end the answer; stop_token_ids still do
    min_length: int = 0  # no stop token ends the answer before the sequence has this many tokens
    max_length: int  # the answer ends (length) when the sequence has this many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    mode: Mode = Mode.PIPELINED
    rule: Rule = Rule.COUPLED
    num_speculative_tokens: int | None = None  # K: the longest path one round may accept; None: by goodput
    drafter: str = ""  # "model": a draft worker; "ngram": the target's own lookup; "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Begin a session on a worker, from nothing or in the middle of an answer (a moved session)."""

    session: int  # 64-bit, made by the coordinator, never used twice
    request_id: str
    tokens: tuple[int, ...]  # prompt and committed tokens; token ids are the target's
    num_prompt_tokens: int
    sampling: SamplingParams
    stops: StopRules
    speculation: SpeculationParams
    remaining_ms: float | None = None  # None: no deadline
    priority: int = 0
    trace_context: str = ""  # W3C traceparent; empty: not traced
    adapter: str = ""
    vocab_size: int = 0  # of the target: no id from here on is ever drafted; 0: unknown
    wants_reports: bool = False  # the worker tells by Reports what it does for this session
    arrived_s: float | None = field(default=None, compare=False)  # when it reached this process; never on the wire

    @property
    def label(self) -> str:
        """The session as logs name it. The request's id is some client's word: one line, and no longer than needed."""
        request = ascii(self.request_id[:MAX_LABEL_CHARS])
        return f"session {self.session} of request {request}" if self.request_id else f"session {self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The distribution from which a node's one sampled child was drawn (rule rejection), and which child that is.

    `parent` counts as in Extension.parents. The child is the node of the same extension below `parent` with the token
    `tokens[index]`. `probs` are float32 values: those that it was drawn from, and those that it is tested against.
    """

    parent: int
    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    index: int

    @property
    def token(self) -> int:
        return self.tokens[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Nodes for the target's copy of the draft tree: a small trie that stands alone (docs/decisions/0005).

    Node i hangs under parents[i]: 0 is the last committed token at `base`, else 1 + the index of an earlier node.
    Children of a node appear in rank order. `confidences[i]` is the drafter's estimate that node i is the target's
    choice given that its parent is on the committed path.
    """

    session: int
    base: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    is_exhausted: bool = False  # no more will come below this base
    drafter: str = "model"
    draft_step: int = 0  # the draft step that made the new nodes: its worker's number, from 1, and beyond the
    # coordinator the request's, since several draft workers may serve one request; 0: untold
    draft_step_ms: float = 0.0  # forward time of that step
    draft_share_ms: float = 0.0  # this session's share of it, by rows
    proposals: tuple[Proposal, ...] = ()  # rule rejection: at most one a parent
    arrived_s: float | None = field(default=None, compare=False)  # when it reached this process; never on the wire

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Sums over the rounds that a commit covers; the unit of all per-request statistics. Merge by `+`."""

    num_rounds: int = 0  # target steps with a decode row of this session
    num_drafted: int = 0  # nodes grafted since the last commit (each path once)
    num_verified: int = 0  # nodes that were rows of these rounds
    num_accepted: int = 0  # committed nodes
    num_judged: int = 0  # walked nodes that had a verified child
    num_first_ranked: int = 0  # of those, the ones whose first-ranked child was the target's choice
    num_hits: int = 0  # rounds that began with a drafted node to verify (a request's first round is not counted)
    num_misses: int = 0
    num_lookup_hits: int = 0  # hits without a node of the session's own drafter
    num_late: int = 0  # extensions grafted below tokens committed since
    num_stale: int = 0  # extensions dropped
    exposed_ms: float = 0.0  # waited for an extension with nothing else to run
    step_ms: float = 0.0  # sum of forward times of steps with rows of this session
    num_steps: int = 0  # steps with rows of this session (prefill included)
    gap_ms: float = 0.0  # sum over rounds of: end of the previous target step to start of this, while ready
    num_gaps: int = 0
    num_cached: int = 0  # prompt tokens whose K and V were there already (said with a session's first round)

    def __add__(self, other: RoundStats) -> RoundStats:
        return RoundStats(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Tokens that are now final. Also the answer to NeedTokens (then with no rounds)."""

    session: int
    round: int  # number of the last round covered, from 1; 0: a resync
    base: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]  # one per token
    next_budget: int = 0  # nodes the target would verify next; the draft worker's aim
    finish_reason: FinishReason | None = None
    verified_draft_steps: tuple[int, ...] = ()  # draft steps, as extensions told, of which a node was verified
    stats: RoundStats = field(default_factory=RoundStats)

    def merged_with(self, later: Commit) -> Commit:
        """One commit that says what this and `later` (its direct continuation) say. Raises ValueError on a gap."""
        if later.base != self.base + len(self.tokens) or self.finish_reason is not None:
            raise ValueError(f"session {self.session}: commit at {later.base} does not continue one at {self.base}")
        return replace(
            later,
            base=self.base,
            tokens=self.tokens + later.tokens,
            origins=self.origins + later.origins,
            verified_draft_steps=self.verified_draft_steps + later.verified_draft_steps,
            stats=self.stats + later.stats,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedTokens:
    """The sender has `have` tokens of the session and needs what follows; answered by one Commit from there."""

    session: int
    have: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A session ended by an error on a worker. Closed follows."""

    session: int
    code: ErrorCode
    message: str
    is_retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    session: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A session's last message: its slots are free and nothing follows. `length`: tokens the worker had."""

    session: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent each second by the event loop of both sides; says what the model thread does."""

    step: int = 0  # number of the running or last step
    step_running_ms: float = 0.0  # how long the thread has been at it, or at mail, planning, a verdict; 0: it waits
    num_sessions: int = 0
    num_free_slots: int = 0
    is_draining: bool = False  # it takes no new session, and ends when its own have ended or its grace is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is learned from a loaded model and its tokenizer."""

    name: str
    fingerprint: str  # of the weights' config and dtype: equal on workers that are interchangeable
    tokenizer_fingerprint: str  # of the vocabulary (ids of real tokens) alone
    vocab_size: int  # ids that the tokenizer knows: 0 .. vocab_size - 1; never the padded output size
    max_context: int  # positions
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Which process a peer is, as traces and metrics name it."""

    host: str = ""
    pid: int = 0
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message each way on a worker stream."""

    protocol_version: int
    incarnation: int  # random 64-bit, drawn at process start
    model: ModelInfo | None = None  # the worker's; None from a coordinator
    num_slots: int = 0
    max_sessions: int = 0
    process: ProcessInfo = field(default_factory=ProcessInfo)
    minor_version: int = 0  # any two go together


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one side of a worker stream has to say at one moment, for all sessions; numbered from 1 by the sender."""

    sequence: int
    opens: tuple[Open, ...] = ()
    extensions: tuple[Extension, ...] = ()
    commits: tuple[Commit, ...] = ()
    need_tokens: tuple[NeedTokens, ...] = ()
    failures: tuple[Failed, ...] = ()
    closes: tuple[Close, ...] = ()
    closed: tuple[Closed, ...] = ()
    heartbeat: Heartbeat | None = None
    reports: tuple[Report, ...] = ()


SessionMessage = Open | Extension | Commit | NeedTokens | Failed | Close | Closed | Report
