"""What the plan says of weights on disk that are converted before they can be read from there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from overspill.checkpoint.converted import ConvertedFolder
from overspill.checkpoint.converted_making import refuse_excess
from overspill.config import format_bytes
from overspill.model.converted import how_converted, origins, weight_keys
from overspill.model.weights import ModelMap, Weight


def conversion_note(model: ModelMap, weights: Sequence[Weight]) -> str:
    """A line that says what is converted, how, and where to. No tensor is read for it.

    Raises CapacityError where the cache's limit or its disk cannot hold what it does not have yet.
    """
    folder = ConvertedFolder.of_environment(os.environ)
    files = {extent.file for weight in weights for extent in origins(weight)}
    keys = weight_keys(weights, model, {file: folder.index.known(file, model.stamps[file]) for file in files})
    there = folder.has(keys.values())
    missing = [weight for weight in weights if keys.get(weight.full) not in there]
    total, missing_bytes = (sum(w.nbytes for w in some) for some in (weights, missing))
    refuse_excess(folder, missing_bytes)
    ways = ", ".join(f"{count} {how}" for how, count in sorted(Counter(map(how_converted, weights)).items()))
    if not missing:
        state = "which has them"
    else:
        has = format_bytes(total - missing_bytes) if there else "none"
        state = f"which has {has} of them yet"
        if not all(weight.full in keys for weight in missing) and folder.entry_keys():
            state = f"which is known to have {has} of them: the checkpoint's content has not been read yet"
    return (
        f"{len(weights)} weights on disk ({format_bytes(total)}) are not in the checkpoint as they are computed with, "
        f"and are converted once ({ways}) into the cache {folder.path}, {state}"
    )
