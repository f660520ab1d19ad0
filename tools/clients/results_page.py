"""docs/clients.md: a row for each client, and the names of its checks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill

_HEAD = """# Clients

What unmodified clients of other projects do with a server: the newest versions that the package index had on the day
of the run, each in an environment of its own; prefill and decode apart on a CPU. `make clients`
(`python -m tools.clients.client_table`) runs them and writes this page; `make clients ARGS="openai node"` runs those
two and leaves the other rows as they are. The checks are in `tools/clients`. `make test-full` runs all of them,
`make test` those that need no environment: openai, and Chromium where it is installed (`tests/e2e/test_clients.py`).

Libraries and the browser talk to SmolLM2-135M with a template that shows tools. A small model says little that is
right: what is checked is form, and that forced calls and structured answers are what was asked for. Load generators and
the evaluation harness talk to `models/recall-micro`, whose right answers are known: lm-eval must score 1.0, and the
cache report of sglang's benchmark must say what the server counted.

That benchmark is installed without what only sglang's kernels need, and torchvision, which it imports for images, is an
empty module (`tools/clients/run_sglang.py`). Routers are in P/D mode before a prefill and a decode worker with
`--http`, and must answer as the server does ([deploy](deploy.md#sglangs-pd-mode)). Dynamo's frontend is before a worker
of `deltaserve dynamo`, without etcd and NATS ([deploy](deploy.md#nvidia-dynamo)), installed without aisimulate, whose
wheel is on NVIDIA's index. Where the project's torch is a build for CPUs, the clients' is too. The browser is Debian's
`chromium-headless-shell`; its page is at another origin, the one that the server allows.

| client | version | day | passed | what failed |
|---|---|---|---|---|
"""
_DETAILS = "Checks, by client:"
_AGENTS_HEADING = "\n## Coding agents\n"
_AGENTS = (
    _AGENTS_HEADING
    + """
Claude Code and Codex were not run against a server. What was checked are requests of the form that they send, and of
what the AI SDK, LiteLLM and openai-agents send beside the checks above (`tests/server`, most in
`test_agent_clients.py`):

- Claude Code 2.1, `/v1/messages`: turns of the role `system` within a conversation, the billing header,
  `context_management`, a `budget_tokens` of `max_tokens` - 1, long names of tools, a prompt that is too long.
- Codex, `/v1/responses`: `instructions` beside a `developer` item, tools that are no functions, a call that was cut.
- AI SDK: signed thinking of `/v1/messages`. By `/v1/responses` it sends `item_reference`, a 400: set
  `providerOptions.openai.store` to false, or take `provider.chat(model)`.
- openai-agents: `tool_choice` "required" beside a form of the answer. LiteLLM: a prompt that is too long.

### Claude Code

```
{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:30000", "ANTHROPIC_AUTH_TOKEN": "the API key, or any text",
  "ANTHROPIC_MODEL": "qwen3", "ANTHROPIC_DEFAULT_OPUS_MODEL": "qwen3", "ANTHROPIC_DEFAULT_SONNET_MODEL": "qwen3",
  "ANTHROPIC_DEFAULT_HAIKU_MODEL": "qwen3", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192"}}
```

- Any other model name is a 404: name the served one for every use, or give the server more names
  (`--served-model-name`).
- `CLAUDE_CODE_MAX_OUTPUT_TOKENS` must leave room for the prompt: what is asked for counts in full against the context
  (`--context-length`). Where they do not fit together the 400 says so in Anthropic's words, with the numbers by
  which Claude Code asks for less; at "prompt is too long" it compacts its conversation.
- Its system prompt begins with a line `x-anthropic-billing-header: ...`, another one in every request, which would keep
  every prompt from being found in a cache. The server leaves that line out, here as in a count of tokens, and counts it
  (`deltaserve_ignored_fields_total`). `"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"` keeps it from being sent.
- System turns within a conversation go where the model's template shows them
  ([tools](tools.md#system-messages)); `redacted_thinking` of Anthropic's models is skipped and counted.
- `context_management` may keep thinking, or clear it (`clear_thinking_20251015`): which is read again is the choice of
  the model's template. Edits of other kinds are a 400.

### Codex

```
model = "qwen3"
model_provider = "deltaserve"
model_context_window = 32768

[model_providers.deltaserve]
name = "deltaserve"
base_url = "http://127.0.0.1:30000/v1"
wire_api = "responses"
env_key = "DELTASERVE_KEY"
```

- `env_key` names a variable with the API key; leave it out where the server has none.
- `model_context_window` is the server's context, by which Codex compacts.
- Tools that OpenAI's servers run (`web_search`, `image_generation`, a `namespace`) are left out and counted: the model
  is offered the functions alone.
"""
)
"""What is said of programs that are not run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One client's result."""

    client: str
    version: str
    day: str
    checks: Sequence[str]
    failed: Sequence[tuple[str, str]]
    """(check, what went wrong)"""

    def __str__(self) -> str:
        failed = "; ".join(f"{check}: {told}".replace("|", "/") for check, told in self.failed)
        passed = len(self.checks) - len(self.failed)
        return f"| {self.client} | {self.version} | {self.day} | {passed} of {len(self.checks)} | {failed} |"

    @property
    def details(self) -> str:
        """The names of its checks, as a point of a list."""
        return fill(f"- {self.client}: {', '.join(self.checks)}.", 120, subsequent_indent="  ")


def page_of(rows: Iterable[Row], names: Sequence[str], before: str) -> str:
    """The page with these rows; the rest of `names`, in whose order they come, stays as it was `before`, if it was."""
    lines = _lines_of(before) | {row.client: str(row) for row in rows}
    details = _details_of(before) | {row.client: row.details for row in rows}
    table = "".join(f"{lines[name]}\n" for name in names if name in lines)
    points = "".join(f"{details[name]}\n" for name in names if name in details)
    return f"{_HEAD}{table}\n{_DETAILS}\n\n{points}{_AGENTS}"


def _lines_of(page: str) -> dict[str, str]:
    """Client |-> its line of the table."""
    _, _, table = page.partition(_DETAILS)[0].partition("|---|\n")
    return {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}


def _details_of(page: str) -> dict[str, str]:
    """Client |-> its point of the list."""
    _, _, details = page.partition(_AGENTS_HEADING)[0].partition(_DETAILS)
    points = re.findall(r"^- [^:]+:.*(?:\n  .*)*", details, re.MULTILINE)
    return {point[2:].partition(":")[0]: point for point in points}
