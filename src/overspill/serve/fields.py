"""The frame of every request body: strict about its keys and types, and honest about what it cannot honour."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from overspill.config.refusals import dotted, shown

# Where a field is one or several, what is given says which, so that only the branch that was meant finds mistakes.
ONE, SEVERAL = "<one>", "<several>"
ONE_OR_SEVERAL = Discriminator(lambda value: SEVERAL if isinstance(value, list) else ONE)

_LONGEST_NAME = 64

TokenId = Annotated[int, Field(ge=0, lt=2**63)]


class Body(BaseModel):
    """A JSON object in which an unknown key is an error that names the closest known one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        names = [field.alias or name for name, field in cls.model_fields.items()]
        for name in data if isinstance(data, dict) else ():
            if name not in names:
                shown_name = name[:_LONGEST_NAME]  # comparing takes long for what is no name
                near = difflib.get_close_matches(shown_name, names, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"known are: {' '.join(names)}"
                raise refuse(f"is unknown; {hint}", shown_name)
        return data


class Only:
    """Marks a field of OpenAI's or vLLM's that is accepted only with values that ask for nothing; `why` is told."""

    def __init__(self, *values: Any, why: str) -> None:
        self._values = (None, *values)
        self._why = why

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._judge)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(self._values), "description": f"Only these: {self._why}."}

    def _judge(self, value: Any) -> Any:
        if any(type(value) is type(known) and value == known for known in self._values):
            return value
        raise refuse(f"cannot be honoured: {self._why}")


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse(f"holds half a character at {error.start}, which is no text") from error
    return text


Text = Annotated[str, AfterValidator(_whole)]
"""JSON may say \\ud800 alone, which no tokenizer takes."""


def mistake(errors: Iterable[Any]) -> tuple[str, str | None]:
    """The message and the field of the first of pydantic's errors about a body."""
    details = next(iter(errors))
    location = [part for part in details["loc"] if not str(part).startswith("<")]  # a union's tags
    where, *inside = location or ["body"]
    if blamed := details.get("ctx", {}).get("field"):
        inside.append(blamed)
    field = dotted(inside)
    if details["type"] == "refused":
        return f'"{field}" {details["msg"]}', field
    if details["type"] == "missing" and inside:
        return f'"{field}" is missing', field
    if not inside:
        return f"the {where} must be a JSON object", None
    return f'"{field}" is {shown(details["input"])}: {details["msg"]}', field


def refuse(text: str, field: str | None = None) -> PydanticCustomError:
    """For a validator to raise. `text` reads on from the name of `field`, or of what the validator is attached to."""
    return PydanticCustomError("refused", "{text}", {"text": text, "field": field})
