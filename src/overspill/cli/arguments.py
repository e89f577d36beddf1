"""vLLM's lists after one option, which click does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overspill.errors import ConfigError

_OF_WEIGHTS = frozenset({"--cpu-offload-params", "--offload-params"})
LISTS = _OF_WEIGHTS | {"--served-model-name"}


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--offload-params a b` becomes `--offload-params a --offload-params b`.

    As in vLLM a list runs to the next option, so the model stands before it. Raises ConfigError for a list of nothing.
    """
    return list(_normalised(arguments))


def _normalised(arguments: Sequence[str]) -> Iterator[str]:
    filling: str | None = None
    empty = False
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") or argument == "-":
            if filling is not None:
                empty = False
                yield filling
            yield argument
            continue
        _refuse_empty(filling, empty)
        filling, empty = None, False
        if argument == "--":
            yield from arguments[index:]
            return
        if (name := argument.replace("_", "-")) in LISTS:
            filling, empty = name, True
        else:
            yield argument
    _refuse_empty(filling, empty)


def _refuse_empty(option: str | None, empty: bool) -> None:
    if not empty:
        return
    if option in _OF_WEIGHTS:
        hint = f"at least one selector after it, as in `{option} mlp.down_proj lm_head`"
        raise ConfigError(f"{option} names no weight", hint=hint)
    raise ConfigError(f"{option} names nothing", hint="at least one name after it")
