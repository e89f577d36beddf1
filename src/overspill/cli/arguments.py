"""vLLM's spellings, which click does not know: lists after one option, underscores in option names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LISTS = frozenset({"--cpu-offload-params", "--offload-params"})


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--offload-params a b` becomes `--offload-params a --offload-params b`; `--cpu_offload_gb` gets its dashes.

    As in vLLM a list runs to the next option, so the model stands before it.
    """
    return list(_normalised(arguments))


def _normalised(arguments: Sequence[str]) -> Iterator[str]:
    filling: str | None = None
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
            return
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            filling = name if name in LISTS and not equals else None
            if filling is None:
                yield name + equals + value
        elif (argument.startswith("-") and len(argument) > 1) or filling is None:
            filling = None
            yield argument
        else:
            yield from (filling, argument)
