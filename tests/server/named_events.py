"""A dialect that test_dialects.py adds to a copy of the sources: its own names of fields, named events, own errors."""

from collections.abc import Mapping

from pydantic import ConfigDict

from deltaserve.server.api_errors import ApiError, ErrorShape, Json, closed_object
from deltaserve.server.body_fields import Body, parse
from deltaserve.server.dialect import AnswerFormat, Dialect
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, compose, new_id
from deltaserve.server.prompts import read_prompt
from deltaserve.server.replies import event
from deltaserve.server.sampling_fields import EndpointFields
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Counted


class NamedBody(Body):
    """A text, how much may follow it, and whether it comes in events."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"says": "Hello", "most": 4}]})

    says: str
    most: int
    live: bool | None = None


def named_job(body: NamedBody, asker: Asker) -> Job:
    """The shared fields are filled in from this dialect's."""
    prompt = read_prompt(body.says, "says", asker.codec, asker.limits)
    limit = OutputLimit(asker.limits, "says", "most", body.most, None)
    fields = parse(Common, {"stream": body.live, "temperature": 0.0}, asker.unknown_fields)
    asked = EndpointFields(limit.resolve(prompt), None, None)
    return compose(fields, asker, [prompt], [asked], new_id("named-"), None)


def named_error(error: ApiError) -> Json:
    return {"kind": "error", "what": error.code}


class NamedFormat(AnswerFormat):
    """begun, said ..., then ended or error."""

    def __init__(self, codec: TextCodec, job: Job, fields: NamedBody) -> None:
        self._job = job

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json:
        return {"said": pieces[0].text, "used": self._used(counted)}

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        begun = event({"model": self._job.model, "in": self._job.prompt_len}, "begun") if is_first else b""
        return begun + (event({"text": piece.text}, "said") if piece.text else b"")

    def last_events(self, counted: Counted) -> bytes:
        return event({"used": self._used(counted)}, "ended")

    def error_events(self, error: ApiError) -> bytes:
        return event(named_error(error), "error")

    def _used(self, counted: Counted) -> Json:
        return {"in": self._job.prompt_len, "out": counted[0][0]}


_TEXT = {"type": "string"}
ERRORS = ErrorShape("NamedError", "An error by its code", closed_object(kind=_TEXT, what=_TEXT), named_error)
DIALECT = Dialect("/v1/named", "Say more", NamedBody, named_job, NamedFormat, ("says",), ERRORS)
