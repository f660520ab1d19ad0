"""Checks of a model folder: can it be served, with how much memory, and does its tokenizer fit."""

from collections.abc import Iterator

from deltaserve.core.errors import ConfigError
from deltaserve.core.findings import Level, Line
from deltaserve.core.sizes import size
from deltaserve.launch.compose import Checkpoint, open_checkpoint, resolve_settings
from deltaserve.model.model_spec import ModelSpec
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.settings.config import Settings

_SAMPLE = "A page is 64 tokens; \u4f60\u597d, \u00fcber."


def check_model(settings: Settings) -> Iterator[Line]:
    """Nothing is loaded. `settings`: as `serve` would have them."""
    try:
        checkpoint = open_checkpoint(settings)
    except ConfigError as error:
        yield Line(Level.FAIL, "model", str(error).removeprefix("MODEL "))
        return
    spec = checkpoint.spec
    files = f"files of {size(checkpoint.num_bytes)}, weights in {spec.dtype.value}"
    context = f"context of {spec.max_position} tokens"
    yield Line(Level.OK, "model", f"{checkpoint.name}: {spec.num_layers} layers, {files}, {context}")
    yield from (Line(Level.WARN, "model", note) for note in checkpoint.notes)
    yield _pool(checkpoint, settings)
    yield from _tokenizer(checkpoint, spec)


def _pool(checkpoint: Checkpoint, settings: Settings) -> Line:
    """What `serve` would choose now."""
    try:
        *_, resolved = resolve_settings(settings, checkpoint).values()
    except ConfigError as error:
        return Line(Level.FAIL, "pages", str(error))
    num_pages = resolved.num_pages[0]
    page_bytes = resolved.kv_bytes // num_pages
    text = f"a new server would have {num_pages} of {resolved.page_size} tokens per worker "
    text += f"({size(page_bytes)} each, {resolved.kv_cache_dtype})"
    text += f", {size(resolved.kv_bytes)}; longest request {resolved.context_len} tokens"
    facts = checkpoint.facts(resolved.tp_size)
    weights = facts.weight_bytes(resolved.dtype, resolved.quantization, resolved.device)
    text += f"; weights {size(weights)}" + (" on each rank" if resolved.tp_size > 1 else "")
    is_short = resolved.context_len < checkpoint.spec.max_position
    return Line(Level.WARN if is_short else Level.OK, "pages", text)


def _tokenizer(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[Line]:
    try:
        codec = TextCodec.load(checkpoint.path, overrides=checkpoint.overrides)
    except ConfigError as error:
        yield Line(Level.FAIL, "tokenizer", str(error))
        return
    back = codec.decode(codec.encode(_SAMPLE, add_special_tokens=False))
    if codec.vocab_size > spec.vocab_size:
        text = f"{codec.vocab_size} tokens, the model knows {spec.vocab_size}"
        yield Line(Level.FAIL, "tokenizer", text)
    elif back != _SAMPLE:
        yield Line(Level.WARN, "tokenizer", f"{codec.vocab_size} tokens; text does not survive: {back[:40]!r}")
    else:
        yield Line(Level.OK, "tokenizer", f"{codec.vocab_size} tokens; text survives encoding and decoding")
    if codec.has_chat_template:
        yield Line(Level.OK, "template", "there is one")
    else:
        yield Line(Level.WARN, "template", "none: /v1/chat/completions will be refused")
