"""What can be wrong with a start of vLLM: what was asked for, held against what was moved."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.audit.records import Facts, Finding, unique
from overspill.audit.vllm_facts import (
    OLDEST,
    asked_uva_gib,
    dead_selector,
    is_sparse,
    older_than,
    selectors,
    was_loaded,
)


def findings(facts: Facts) -> Iterator[Finding]:
    for judge in (_flag_ignored, _budget_overridden, _selectors, _without_budget, _uva_spent, _order):
        yield from judge(facts)


def _flag_ignored(facts: Facts) -> Iterator[Finding]:
    """A budget, a loaded model, and no offloader."""
    uva, group = asked_uva_gib(facts), facts.asked_number("offload_group_size")
    moved = facts.first("uva_bytes", "prefetch")
    set_to = facts.last("offloader")
    if not (uva > 0 or group > 0) or moved is not None or not was_loaded(facts):
        return
    if set_to is None and older_than(facts.version, OLDEST):
        return
    if set_to is not None and set_to.groups["name"] != "NoopOffloader":
        return  # chosen, and found nothing to move: judged elsewhere
    asked = f"cpu_offload_gb={uva:g}" if uva > 0 else f"offload_group_size={group:g}"
    runner = facts.first("runner_v2")
    why = f"{asked} was accepted, and no offloader was set: every weight is on the device."
    if runner is not None:
        why += (
            " The V2 model runner of earlier versions installs no offloader (vllm#50672, #51396, #56283); "
            "0.33.0 has it in both runners."
        )
    remedy = (
        "upgrade to 0.33.0, or start with VLLM_USE_V2_MODEL_RUNNER=0, and look for the line "
        '"Total CPU offloaded parameters"'
        if runner is not None and older_than(facts.version, 33)
        else 'look for "Offloader set to UVAOffloader" after the next start, and report it to vLLM if it is missing'
    )
    lines = facts.asked_lines("cpu_offload_gb", "offload_group_size")
    seen = [hit.line for hit in (runner, set_to, facts.first("loaded")) if hit is not None]
    remedy += "; overspill ends a start whose budget moved nothing with an error"
    yield Finding("flag-ignored", "error", unique((*lines, *seen)), why, remedy)


def _budget_overridden(facts: Facts) -> Iterator[Finding]:
    told = facts.all("both_set", "uva_ignored", "prefetch_ignored")
    uva, group = asked_uva_gib(facts), facts.asked_number("offload_group_size")
    backend = facts.setting("offload_backend") or "auto"
    if not told and not (uva > 0 and group > 0):
        return
    if backend == "uva" or facts.first("prefetch_ignored") is not None:
        loser, winner = "the prefetch settings (offload_group_size and what belongs to it)", "uva"
    else:
        loser, winner = "cpu_offload_gb and cpu_offload_params", "prefetch"
    lines = [hit.line for hit in told] or list(facts.asked_lines("cpu_offload_gb", "offload_group_size"))
    yield Finding(
        "budget-overridden",
        "warning",
        unique(lines),
        f"vLLM runs one backend at a time: {winner} was taken, and {loser} had no effect. With offload_backend=auto "
        "any offload_group_size above 0 wins over cpu_offload_gb (0.27 to 0.33).",
        "drop the settings that lose, or name the backend (--offload-backend); "
        "overspill mixes both in one plan, per weight",
    )


def _selectors(facts: Facts) -> Iterator[Finding]:
    for name in ("cpu_offload_params", "offload_params"):
        asked = selectors(facts, name)
        active = (
            asked_uva_gib(facts) > 0 if name == "cpu_offload_params" else facts.asked_number("offload_group_size") > 0
        )
        if not asked or not active or not was_loaded(facts):
            continue
        offloader = facts.last("offloader")
        moved = facts.first("uva_bytes" if name == "cpu_offload_params" else "prefetch")
        settled = facts.first("kv_memory", "ready") is not None
        none_moved = moved is None and offloader is not None and offloader.groups["name"] != "NoopOffloader" and settled
        dead = [(text, why) for text in asked if (why := dead_selector(text, facts.version)) is not None]
        if not none_moved and not dead:
            continue
        reasons = "".join(f' "{text}": {why}.' for text, why in dead)
        lines = [*facts.asked_lines(name), *(hit.line for hit in (offloader, facts.first("loaded")) if hit)]
        yield Finding(
            "selector-no-match",
            "error" if none_moved else "warning",
            unique(lines),
            f"{name} ({', '.join(asked)}) "
            f"{'matched no weight, so nothing was moved' if none_moved else 'can not match'}"
            f", and vLLM says nothing about it (0.27 to 0.33).{reasons} A selector matches whole dotted segments "
            "of the "
            "name within its layer.",
            "write segments as the layer has them, separated by spaces: experts w13_weight gate_up_proj; "
            "overspill refuses a selector that matches nothing, and shows the closest names",
        )


def _without_budget(facts: Facts) -> Iterator[Finding]:
    backend = facts.setting("offload_backend")
    pairs = (("cpu_offload_params", "cpu_offload_gb"), ("offload_params", "offload_group_size"))
    for name, budget in pairs:
        if selectors(facts, name) and not facts.asked_number(budget) > 0:
            yield Finding(
                "params-without-budget",
                "error",
                facts.asked_lines(name),
                f"{name} is set and {budget} is 0: vLLM then offloads nothing, and says nothing (0.27 to 0.33).",
                f"add --{budget.replace('_', '-')}",
            )
    if backend == "uva" and not asked_uva_gib(facts) > 0 and facts.first("uva_bytes") is None:
        yield Finding(
            "budget-zero",
            "error",
            unique((*facts.asked_lines("offload_backend"), *(hit.line for hit in facts.all("offloader")[:1]))),
            "offload_backend=uva with a budget of 0 sets the offloader and moves nothing.",
            "add --cpu-offload-gb",
        )


def _uva_spent(facts: Facts) -> Iterator[Finding]:
    """What the budget bought: nothing, too little, or more than was asked for."""
    asked = asked_uva_gib(facts)
    told = facts.per_label("uva_bytes")
    offloader = facts.last("offloader")
    filtered = bool(selectors(facts, "cpu_offload_params"))
    if not told and asked > 0 and not filtered and offloader is not None and was_loaded(facts):
        if offloader.groups["name"] == "UVAOffloader":
            yield Finding(
                "flag-ignored",
                "error",
                unique((*facts.asked_lines("cpu_offload_gb"), offloader.line)),
                f"UVAOffloader was set with {asked:g} GiB, and no line says what was offloaded: it moved nothing. It "
                "skips a module whose first parameter is on the CPU when it is built, and sees only models that build "
                "their layers through make_layers.",
                "check the quantization method and the architecture; overspill walks every weight after loading and "
                "names those that are not where the plan says",
            )
        return
    if not told or not asked > 0:
        return
    least = min(told.values(), key=lambda hit: hit.number("gib"))
    gib = least.number("gib")
    lines = unique((*facts.asked_lines("cpu_offload_gb", "cpu_offload_params"), least.line))
    if gib < 0.01 * asked:
        yield Finding(
            "selector-no-match" if filtered else "flag-ignored",
            "error",
            lines,
            f"{asked:g} GiB were asked for and {gib:g} GiB were moved: as good as nothing. "
            + (
                "The selectors match only small weights."
                if filtered
                else "Parameters that some quantization methods build as placeholders on the CPU are skipped."
            ),
            "choose selectors of large weights (experts, w13_weight)" if filtered else "offload another quantization",
        )
    elif gib < 0.9 * asked:
        yield Finding(
            "budget-underspent",
            "warning",
            lines,
            f"{asked:g} GiB were asked for and {gib:g} GiB were moved, so {asked - gib:.2f} GiB less is free on "
            "the device "
            "than was planned with. "
            + ("The selectors match no more." if filtered else "The layers hold no more that can be moved."),
            "widen cpu_offload_params, or plan with what was moved",
        )
    elif gib > 1.05 * asked and gib - asked > 0.1:
        yield Finding(
            "budget-overshot",
            "note",
            lines,
            f"{asked:g} GiB were asked for and {gib:g} GiB were moved: the budget is tested before each "
            "parameter, so the "
            "last one goes over by its whole size.",
            "lower the budget by the size of one parameter where host memory is short",
        )


def _order(facts: Facts) -> Iterator[Finding]:
    moved = facts.last("uva_bytes")
    if moved is None or selectors(facts, "cpu_offload_params") or not moved.number("gib") > 0:
        return
    if not is_sparse(facts):
        return
    signs = [hit.line for hit in (facts.first("architecture"), facts.first("moe")) if hit is not None]
    yield Finding(
        "declaration-order",
        "warning",
        unique((*signs[:1], moved.line)),
        "without cpu_offload_params vLLM moves parameters in the order of their declaration, from the first layer on: "
        "attention and dense weights, which every token reads, before experts, of which a token reads a few. "
        "One report has 4.26 against 9.46 tokens/s (vllm#54593).",
        "--cpu-offload-params experts; overspill moves what costs least per step first, without being told",
    )
