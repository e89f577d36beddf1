"""The frame of every document here: frozen, strict about its keys, refused in one voice.

pydantic judges, ConfigError speaks: the dotted key as it was written, the value, the bound, and as the hint
what the field is for.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from overspill.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_REFUSED = "refused"
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type")


class Frozen(BaseModel):
    """A part of a document: unknown keys are errors, and nothing changes after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid")


DocumentT = TypeVar("DocumentT", bound=Frozen)


def refusal(text: str) -> PydanticCustomError:
    """An error for a validator to raise; its text reads on from the key: "must be a boolean"."""
    return PydanticCustomError(_REFUSED, "{text}", {"text": text})


def _boolean(value: object) -> object:
    if not isinstance(value, bool):
        raise refusal("must be a boolean")
    return value


def _integer(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        raise refusal("must be an integer")
    return value


def _positive(value: int) -> int:
    if value <= 0:
        raise refusal(f"must be positive (got {value})")
    return value


# vllm.cpp's kinds: nothing is converted.
Boolean = Annotated[bool, BeforeValidator(_boolean)]
WholeNumber = Annotated[int, BeforeValidator(_integer)]
Positive = Annotated[WholeNumber, AfterValidator(_positive)]


def validated(document: type[DocumentT], fields: object, *, subject: str, at: tuple[str, ...] = ()) -> DocumentT:
    """`fields` as a `document`; `at` is where it hangs in the whole, for the keys in the messages.

    Raises ConfigError with one line per mistake, each beginning with `subject`.
    """
    try:
        return document.model_validate(fields)
    except ValidationError as error:
        told = [_told(details, document, at) for details in error.errors(include_url=False)]
        hints = dict.fromkeys(hint for _, hint in told if hint)
        raise ConfigError(
            "\n".join(f"{subject}: {message}" for message, _ in told), hint="; ".join(hints) or None
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint with the closest of the known names, if one is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean "{near[0]}"?' if near else None


def shown(value: object) -> str:
    """A value as it stood in the document, shortened."""
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def named(path: str, origin: str | None) -> str:
    """A key for a message, behind the environment variable that set it, if one did (`origin`: "VT_CPU_MOE=1")."""
    return f'{origin} ("{path}")' if origin else f'"{path}"'


def dotted(location: Iterable[int | str]) -> str:
    """`placement.overrides[0].pattern` for ("placement", "overrides", 0, "pattern")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _told(details: ErrorDetails, document: type[Frozen], at: tuple[str, ...]) -> tuple[str, str | None]:
    location, kind = details["loc"], details["type"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.message, cause.hint
    path = dotted((*at, *location))
    if kind == "extra_forbidden":
        parent, _ = _find(document, location[:-1])
        known = [name for field, info in parent.model_fields.items() for name in _names(field, info)]
        wrong = str(location[-1])
        return (
            f'unknown key "{path}" (expected one of: {" ".join(known)})',
            did_you_mean(wrong, known) or f'remove "{wrong}"',
        )
    _, field = _find(document, location)
    hint = f'"{path}": {field.description}' if field and field.description else None
    if kind == _REFUSED:
        return f'"{path}" {details["msg"]}', hint
    if kind in _NOT_AN_OBJECT:
        return f'"{path}" must be a JSON object' if path else "must be a JSON object", hint
    return f'"{path}" is {shown(details["input"])}: {details["msg"]}', hint


def _find(document: type[BaseModel], location: Iterable[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The innermost document at a location, and the field that was last passed on the way."""
    found: FieldInfo | None = None
    for part in location:
        for name, field in document.model_fields.items():
            if part in _names(name, field):
                found, document = field, _document_in(field.annotation) or document
                break
    return document, found


def _document_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_document_in, get_args(annotation))), None)


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]
