"""What chat and text completions are asked for with: what is honoured, and what is refused by name.

vLLM's fields beyond OpenAI's are known too. Defaults are OpenAI's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from overspill.config.refusals import shown
from overspill.engine.requests import MAX_LOGPROBS
from overspill.serve.fields import ONE, ONE_OR_SEVERAL, SEVERAL, Body, Only, Text, TokenId, refuse

MAX_CHOICES, MAX_STOPS, MAX_PROMPTS, MAX_MESSAGES, MAX_BIASES = 128, 16, 2048, 4096, 1024
COMPLETION_TOKENS = 16  # OpenAI's default for text completions

_NO_TOOLS = "this server calls no tools"
_TEXT_ONLY = "only text goes in and comes out"
_BY_FORMAT = "a JSON schema is imposed by response_format, and no other grammar is"
_UNBUILT = "it is not built"

Stop = Annotated[Text, Field(min_length=1)]
Stops = Annotated[
    Annotated[Stop, Tag(ONE)] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag(SEVERAL)], ONE_OR_SEVERAL
]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _temperature(value: float) -> float:
    if 0.0 < value < 1e-3:
        raise refuse(f"is {value!r}, and must be 0 (the likeliest token) or from 0.001 to 1000")
    return value


class StreamOptions(Body):
    include_usage: bool = Field(default=False, description="Send a last chunk with the count of tokens.")
    include_obfuscation: Annotated[Any, Only(False, why="nothing is padded here")] = None
    continuous_usage_stats: Annotated[Any, Only(False, why="usage is counted once, in the last chunk")] = None


class JsonSchemaFormat(Body):
    """What the answer must be, as JSON Schema says it; `strict` or not, it is always followed."""

    name: Annotated[Text, Field(max_length=64)] = "answer"
    description: Text | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            missing = "is missing" if self.json_schema is None else f'is given, but type is "{self.type}"'
            raise refuse(missing, "json_schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None for free text."""
        if self.type == "text":
            return None
        return self.json_schema.json_schema if self.json_schema is not None else {"type": "object"}


class Sampled(Body):
    """The fields that both kinds of completion have."""

    model: str | None = Field(default=None, description="One of GET /v1/models; absent is the first of them.")
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    stream: bool | None = Field(default=None, description="Send the answer piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, description="The most tokens of an answer.")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, description="max_tokens, renamed.")
    temperature: Annotated[float, Field(ge=0, le=1000), AfterValidator(_temperature)] | None = Field(
        default=None, description="1 by default; 0 takes the likeliest token."
    )
    top_p: Annotated[float, Field(ge=1e-9, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 or -1 is all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")], Bias] | None = Field(
        default=None, max_length=MAX_BIASES, description="Token ids, as texts, to what is added to their scores."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, description="Answer i is sampled with seed + i; absent, each has one of its own."
    )
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = Field(default=None, description="Go on after the token that ends an answer.")

    response_format: ResponseFormat | None = Field(
        default=None, description="JSON that follows a schema, or any JSON object; free text is the default."
    )

    # They change nothing in the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[Any, Only("auto", "default", why="there is one tier of service")] = None
    store: Annotated[Any, Only(False, why="nothing is stored")] = None
    priority: Annotated[Any, Only(0, why="requests are served in the order they arrive in")] = None

    # vLLM's, not honoured.
    use_beam_search: Annotated[Any, Only(False, why=_UNBUILT)] = None
    length_penalty: Annotated[Any, Only(1, 1.0, why="there is no beam search")] = None
    min_tokens: Annotated[Any, Only(0, why=f"{_UNBUILT}; ignore_eos goes on to max_tokens")] = None
    bad_words: Annotated[Any, Only([], why=f"{_UNBUILT}; logit_bias keeps single tokens out")] = None
    allowed_token_ids: Annotated[Any, Only(why=f"{_UNBUILT}; logit_bias weighs tokens")] = None
    prompt_logprobs: Annotated[Any, Only(why="log-probabilities are of the answer's tokens")] = None
    truncate_prompt_tokens: Annotated[Any, Only(why="a prompt is computed whole or refused")] = None
    skip_special_tokens: Annotated[Any, Only(True, why="special tokens are no part of the text")] = None
    spaces_between_special_tokens: Annotated[Any, Only(True, why="special tokens are no part of the text")] = None
    include_stop_str_in_output: Annotated[Any, Only(False, why="a stop text is no part of the answer")] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False, why=_UNBUILT)] = None
    return_token_ids: Annotated[Any, Only(False, why=f"{_UNBUILT}; POST /tokenize gives ids")] = None
    structured_outputs: Annotated[Any, Only(why=_BY_FORMAT)] = None
    guided_json: Annotated[Any, Only(why=_BY_FORMAT)] = None
    guided_regex: Annotated[Any, Only(why=_BY_FORMAT)] = None
    guided_choice: Annotated[Any, Only(why=_BY_FORMAT)] = None
    guided_grammar: Annotated[Any, Only(why=_BY_FORMAT)] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refuse(
                f"is {self.max_completion_tokens}, but max_tokens is {self.max_tokens}: two names of one thing",
                "max_completion_tokens",
            )
        if self.ignore_eos and self.response_format is not None and self.response_format.type != "text":
            raise refuse("cannot be honoured with a response_format: JSON ends where it ends", "ignore_eos")
        if self.stream_options is not None and not self.stream:
            raise refuse('is given, but "stream" is not true', "stream_options")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") != "text":
            raise refuse(f"cannot be {shown(part.get('type'))}: {_TEXT_ONLY}", "type")
        return part


Content = Annotated[
    Annotated[Text, Tag(ONE)] | Annotated[list[TextPart], Field(min_length=1), Tag(SEVERAL)], ONE_OR_SEVERAL
]


class Message(Body):
    """One turn of the conversation. Which roles there are is the chat template's to say."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content
    name: Text | None = None
    tool_calls: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    tool_call_id: Annotated[Any, Only(why=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only(why=_NO_TOOLS)] = None
    audio: Annotated[Any, Only(why=_TEXT_ONLY)] = None
    refusal: Annotated[Any, Only(why="this model's answers have no refusals apart from their text")] = None
    annotations: Annotated[Any, Only([], why=_UNBUILT)] = None
    reasoning_content: Annotated[Any, Only(why="reasoning is not told apart from the answer")] = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name is not None else {})}


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the model's chat template, such as enable_thinking."
    )

    tools: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only("none", why=_NO_TOOLS)] = None
    parallel_tool_calls: Annotated[Any, Only(True, False, why=_NO_TOOLS)] = None
    functions: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only("none", why=_NO_TOOLS)] = None
    web_search_options: Annotated[Any, Only(why=_NO_TOOLS)] = None
    modalities: Annotated[Any, Only(["text"], why=_TEXT_ONLY)] = None
    audio: Annotated[Any, Only(why=_TEXT_ONLY)] = None
    mm_processor_kwargs: Annotated[Any, Only(why=_TEXT_ONLY)] = None
    prediction: Annotated[Any, Only(why=_UNBUILT)] = None
    reasoning_effort: Annotated[Any, Only(why="a model thinks as its template says; see chat_template_kwargs")] = None
    verbosity: Annotated[Any, Only(why="the model is asked for it in words")] = None
    best_of: Annotated[Any, Only(1, why="every answer that is made is given; see n")] = None
    echo: Annotated[Any, Only(False, why="a chat's prompt is not part of its answer")] = None
    add_generation_prompt: Annotated[Any, Only(True, why="the answer is always a new message")] = None
    continue_final_message: Annotated[Any, Only(False, why="the answer is always a new message")] = None
    add_special_tokens: Annotated[Any, Only(False, why="the chat template puts them in")] = None
    chat_template: Annotated[Any, Only(why="the template is the model's own")] = None
    documents: Annotated[Any, Only(why=f"{_UNBUILT}; put them into a message")] = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse('is given, but "logprobs" is not true', "top_logprobs")
        return self


TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _kind_of_prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else None
    return "<texts>" if isinstance(first, str) else "<lists of ids>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("<lists of ids>")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(Sampled):
    """POST /v1/completions."""

    prompt: Prompt = Field(description="A text, token ids, or a list of either.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        default=None, description="So many of the likeliest tokens at each place."
    )
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt; not with logprobs.")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="Only the same as n.")
    add_special_tokens: bool = Field(default=True, description="Whether the tokenizer adds its own to a text.")
    suffix: Annotated[Any, Only("", why="the model continues a text, and does not fill one in")] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise refuse(f"is {self.best_of}, but n is {self.n}: every answer that is made is given", "best_of")
        if self.echo and self.logprobs is not None:
            raise refuse("cannot be honoured with logprobs: those are of the answer's tokens", "echo")
        return self
