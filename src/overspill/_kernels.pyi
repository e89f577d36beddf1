"""The CPU kernels and mappings (kernels/module.cpp). Addresses are those of tensors that the caller keeps alive."""

import enum

class Type(enum.Enum):
    float32 = ...
    bfloat16 = ...
    float16 = ...

class Activation(enum.Enum):
    silu = ...
    gelu = ...
    gelu_tanh = ...
    relu = ...
    relu2 = ...

class Path:
    """The kernels for one instruction set."""

    @property
    def name(self) -> str: ...

def path_names() -> list[str]:
    """Fastest first, whether or not this processor has them."""

def path_named(name: str) -> Path | None:
    """None where this build or this processor lacks it."""

class Experts:
    def __init__(
        self,
        up: int,
        down: int,
        up_bias: int,
        down_bias: int,
        type: Type,
        count: int,
        hidden: int,
        intermediate: int,
        gated: bool,
        transposed: bool,
    ) -> None: ...
    def compute(
        self,
        path: Path,
        activation: Activation,
        index: int,
        weights: int,
        tokens: int,
        each: int,
        hidden: int,
        out: int,
        type: Type,
        threads: int,
    ) -> None: ...
    def compute_up(
        self, path: Path, index: int, tokens: int, each: int, hidden: int, type: Type, products: int, threads: int
    ) -> None: ...
    def compute_down(
        self,
        path: Path,
        index: int,
        weights: int,
        tokens: int,
        each: int,
        gated: int,
        out: int,
        type: Type,
        threads: int,
    ) -> None: ...

def read_memory(path: Path, address: int, bytes: int, threads: int) -> float:
    """Read whole cache lines as fast as memory gives them."""

class Mapping:
    """The first `bytes` of an open file, mapped read-only; unmapped when this is freed. Raises OSError.

    Where the file has lost pages, or its disk cannot give them, what reads them reads zeros from there to the end.
    """

    def __init__(self, fd: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def lost(self) -> int | None:
        """The offset of the first page that could not be read."""

    def restore(self, fd: int) -> None:
        """Map the file again in the same place."""

    def populate(self, offset: int, bytes: int) -> None:
        """Bring a span into the page cache, as far as it can be read. The interpreter's lock is not held."""

def guard_mappings() -> None:
    """Have bus errors come to the mappings first again, where another handler was set since the last one was made."""
