"""Weights used in place, in the mapped files of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.checkpoint import Extent, verify_untouched
from overspill.errors import CheckpointError
from overspill.machine.mappings import MappedFile
from overspill.model.experts import ExpertBlock, expert_blocks
from overspill.model.hf_experts import install, original_forward, weights_from
from overspill.plan import Access, Plan
from overspill.plan.mapped import mapped_pieces


class MappedWeights:
    """`plan.mapped` as tensors over mapped files; memory of theirs is the page cache's.

    `tensors` are the weights that lie in one piece, by name; `experts` compute the blocks of which a weight lies in a
    piece for each expert. `verify` is asked after each pass, since what a pass reads may be lost meanwhile; passes are
    run one at a time.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        blocks = {weight.full: block for block in expert_blocks(plan.model) for weight in block.weights.values()}
        self.tensors: dict[str, torch.Tensor] = {}
        self._files: dict[Path, MappedFile] = {}
        self._pieces: dict[str, tuple[Extent, ...]] = {}
        by_expert: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
        for weight in plan.mapped:
            block = blocks.get(weight.full)
            pieces = mapped_pieces(weight, block.experts if block is not None else None)
            assert pieces is not None, f"{weight.full} is planned to be mapped"
            self._pieces[weight.full] = pieces
            if len(pieces) == 1:
                self.tensors[weight.full] = self._tensor(pieces[0], weight.shape, weight.dtype)
                continue
            assert block is not None
            path, _, attribute = weight.full.rpartition(".")
            views = tuple(self._tensor(piece, weight.shape[1:], weight.dtype) for piece in pieces)
            by_expert.setdefault(path, {})[attribute] = views
        paths = {block.path: block for block in blocks.values()}
        self.experts = [
            MappedExperts(paths[path], model.get_submodule(path), tables) for path, tables in by_expert.items()
        ]
        self._stamps = {path: plan.model.stamps[path] for path in self._files}

    def _tensor(self, piece: Extent, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if piece.file not in self._files:
            self._files[piece.file] = MappedFile(piece.file)
        return self._files[piece.file].tensor(piece, shape, dtype)

    def populate(self, progress: Callable[[int], None] | None = None) -> None:
        """Read what is mapped into the page cache."""
        for pieces in self._pieces.values():
            for piece in pieces:
                self._files[piece.file].populate(piece, progress)

    def install(self, model: nn.Module) -> None:
        """Have the experts computed, and the files looked at around each pass over `model`."""
        for experts in self.experts:
            install(model.get_submodule(experts.block.path), experts)
        if self._files:
            model.register_forward_pre_hook(lambda module, arguments: self._before())
            model.register_forward_hook(lambda module, arguments, result: self.verify())

    def _before(self) -> None:
        """What was lost is read again, once the files are as they were."""
        verify_untouched(self._stamps)
        MappedFile.guard()
        for file in self._files.values():
            if file.lost_at is not None:
                file.restore()

    def verify(self) -> None:
        """After a pass: CheckpointError, with file and weight, where a file changed or a page could not be read."""
        for path, file in self._files.items():
            if (at := file.lost_at) is not None:
                raise CheckpointError(
                    f"{path}: what is mapped from byte {at} on ({self._weight_at(path, at)}) could not be read any "
                    "more: the file was cut short, or its disk failed",
                    hint="put the file back as it was, or start again with the new one",
                )
        verify_untouched(self._stamps)

    def _weight_at(self, path: Path, at: int) -> str:
        """The first weight that ends behind byte `at` of `path`."""
        ends = (
            (piece.offset + piece.length, name)
            for name, pieces in self._pieces.items()
            for piece in pieces
            if piece.file == path and piece.offset + piece.length > at
        )
        return min(ends, default=(0, "no weight"))[1]


class MappedExperts:
    """One block of experts that lie apart in their file; transformers calls it in the place of its own loop."""

    access = Access.IN_PLACE

    def __init__(self, block: ExpertBlock, module: nn.Module, tables: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
        self.block = block
        self._module = module
        self._loop = original_forward(module)
        self._tables = {attribute: _Table(views) for attribute, views in tables.items()}

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with weights_from(self._module, self._tables):
            return self._loop(hidden, index, weights)


class _Table:
    """Stands where a parameter [experts, ...] stood: an expert's part is read where it lies."""

    def __init__(self, views: tuple[torch.Tensor, ...]) -> None:
        self._views = views

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._views[int(expert)]
