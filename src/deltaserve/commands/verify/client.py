"""What `deltaserve verify` asks a server: tokens with their log-probabilities, and scores of given tokens."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deltaserve.commands.client.http_client import fault, http_client
from deltaserve.process.front.secrets import read_api_keys
from deltaserve.settings.urls import server_root

_TIMEOUT_S = 600.0


class VerifyError(Exception):
    """A server could not be asked, or its answer cannot be compared. One line."""


@dataclass(frozen=True, slots=True)
class TokenCompletion:
    """A completion of token ids."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    """Log-probabilities of prompt tokens 1 .. n-1; empty when not asked for."""
    decode_cached_len: int
    prefill_cached_len: int


@dataclass(frozen=True, slots=True)
class Score:
    """A token given the ones before it."""

    logprob: float
    best: float
    """Log-probability of the most likely token there."""


class ServerClient:
    """Asks one server. All prompts share a random salt: the first is cold, whatever the server did before."""

    def __init__(self, base_url: str, api_key_file: Path | None) -> None:
        """Raises ConfigError for a wrong key file."""
        keys = read_api_keys(api_key_file) if api_key_file else ()
        headers = {"Authorization": f"Bearer {keys[0].secret}"} if keys else {}
        self._url = server_root(base_url)
        self._http = http_client(self._url, _TIMEOUT_S, headers)
        self._salt = secrets.token_hex(8)
        self.model = ""
        self.max_len = 0

    def connect(self) -> None:
        """Learn name and longest sequence. Raises VerifyError."""
        info = self._call("GET", "/model_info")
        if not isinstance(info.get("max_context_len"), int):
            raise VerifyError(f"{self._url}: it does not tell its context length: not a ready deltaserve server")
        self.model, self.max_len = str(info["model"]), int(info["max_context_len"])

    def close(self) -> None:
        self._http.close()

    def encode(self, text: str) -> list[int]:
        """Token ids, without special ones."""
        found: list[int] = self._call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return found

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: object) -> TokenCompletion:
        """Greedy unless told. Raises VerifyError."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, **fields}
        body |= {"return_token_ids": True, "timings": True, "cache_salt": self._salt, "model": self.model}
        reply = self._call("POST", "/v1/completions", body)
        choice, timings = reply["choices"][0], reply["usage"]["timings"][0]
        listed = choice.get("prompt_logprobs") or [None]
        return TokenCompletion(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            prompt_logprobs=tuple(e[str(t)]["logprob"] for t, e in zip(prompt[1:], listed[1:], strict=False)),
            decode_cached_len=timings["decode_cached_tokens"],
            prefill_cached_len=timings["prefill_cached_tokens"],
        )

    def score(self, tokens: Sequence[int]) -> list[Score]:
        """Scores of tokens 1 .. n-1, computed anew: nothing comes from a cache."""
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "no_cache": True}
        reply = self._call("POST", "/v1/completions", body | {"prompt_logprobs": 1})
        entries = reply["choices"][0]["prompt_logprobs"][1:]
        return [
            Score(entry[str(token)]["logprob"], max(value["logprob"] for value in entry.values()))
            for token, entry in zip(tokens[1:], entries, strict=True)
        ]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer. A server that says when to come back is asked again then, up to `_TIMEOUT_S` in all."""
        until = time.monotonic() + _TIMEOUT_S
        try:
            reply = self._http.request(method, path, json=body)
            while (pause_s := _retry_after_s(reply)) is not None and time.monotonic() + pause_s < until:
                time.sleep(pause_s)
                reply = self._http.request(method, path, json=body)
            content = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise VerifyError(fault(f"{self._url}{path}", error)) from None
        if reply.is_error or not isinstance(content, dict):
            message = content.get("error", {}).get("message", "") if isinstance(content, dict) else ""
            raise VerifyError(f"{self._url}{path}: HTTP {reply.status_code}: {message[:200]}")
        return content


def _retry_after_s(reply: httpx.Response) -> float | None:
    """Seconds after which a server that is at its limit, or not ready, wants to be asked again; None: it does not."""
    said = reply.headers.get("retry-after", "")
    is_refused = reply.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
    return float(said) if is_refused and said.isascii() and said.isdigit() else None
