"""Converted weights: the right bytes, made once by one process, within limits, and whole or not there at all."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import overspill
from emulated_runs import emulated, forward, mapped, passes, placed, planned, settings_for
from gguf_files import save_gguf
from overspill.checkpoint import Extent
from overspill.checkpoint.converted import FILE_NAME, USED_NAME, ConvertedFolder
from overspill.checkpoint.converted_making import making, new_entry
from overspill.checkpoint.file_locks import lock_file
from overspill.checkpoint.safetensors import read_shard
from overspill.checkpoint.safetensors_layout import ALIGNMENT, PADDING, lay_out
from overspill.engine import SamplingParams
from overspill.errors import CapacityError, CheckpointError, ConfigError
from overspill.model.converted import needs_conversion
from overspill.model.weights import ModelMap, Weight
from overspill.offload import conversion_cache
from overspill.offload.conversion_cache import Converted, convert, verify
from overspill.offload.loader import fill
from overspill.offload.placed import place
from overspill.plan import Plan, Tier, make_plan
from tiny_models import CONTEXT, MakeTiny

STREAM = {"overspill": {"expert_stream": {"slots": 3, "tier": "disk"}}}
IDS = (5, 3, 9, 1, 7)
READING, CONVERTING = "to know its content", "converting "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConvertedFolder:
    monkeypatch.setenv("OVERSPILL_CACHE_DIR", str(tmp_path / "cache"))
    return ConvertedFolder.of_environment(os.environ)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What the log was told since the last call."""
    monkeypatch.setattr(logging.getLogger("overspill"), "propagate", True)
    caplog.set_level(logging.INFO, "overspill")

    taken = 0

    def take() -> str:
        nonlocal taken
        messages = caplog.messages[taken:]  # never cleared: a thread may add one at any time
        taken += len(messages)
        return "\n".join(messages)

    return take


@pytest.fixture
def moe(tmp_path: Path, folder: ConvertedFolder) -> Path:
    return save_gguf(tmp_path / "m.gguf", "qwen3moe")


def to_convert(model: ModelMap) -> list[Weight]:
    return [weight for weight in model if needs_conversion(weight)]


def all_converted(path: Path, dtype: str = "auto") -> Converted:
    model = mapped(path, dtype)
    return convert(to_convert(model), model)


def parts(folder: ConvertedFolder) -> list[str]:
    """What was left of entries in the making."""
    return [path.name for path in folder.path.iterdir() if path.suffix in (".part", ".lock")]


def values(converted: Converted) -> dict[str, bytes]:
    found = {}
    for name, source in converted.sources.items():
        (extent,) = source.extents
        with extent.file.open("rb") as file:
            file.seek(extent.offset)
            found[name] = file.read(extent.length)
    return found


def resident(path: Path, dtype: str = "auto") -> dict[str, bytes]:
    """The same weights as loading converts them."""
    model = mapped(path, dtype)
    targets = {w.full: torch.empty(w.shape, dtype=w.dtype) for w in to_convert(model)}
    fill(targets, model, emulated())
    return {name: bytes(tensor.flatten().view(torch.uint8).numpy()) for name, tensor in targets.items()}


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("qwen3moe", "auto"), ("gpt-oss", "bfloat16"), ("llama", "float16")])
def test_a_gguf_file_s_weights_are_kept_as_loading_converts_them(
    name: str, dtype: str, tmp_path: Path, folder: ConvertedFolder
) -> None:
    path = save_gguf(tmp_path / "m.gguf", name)
    converted = all_converted(path, dtype)
    assert values(converted) == resident(path, dtype)
    (entry,) = folder.entries()
    assert entry.in_use
    assert (entry.made_from, entry.weights) == ((str(path),), len(converted.sources))
    file = folder.path / entry.key / FILE_NAME
    with safe_open(file, "pt") as opened:
        for name in converted.sources:
            assert bytes(opened.get_tensor(name).flatten().view(torch.uint8).numpy()) == values(converted)[name]
    assert all(source.extents[0].offset % ALIGNMENT == 0 for source in converted.sources.values())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_fused"])
def test_what_is_cast_is_too_part_by_part(name: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_cache, "_CHUNK_BYTES", 4096)
    converted = all_converted(tiny(name), "bfloat16")
    assert len(converted.sources) > 10
    assert values(converted) == resident(tiny(name), "bfloat16")


def test_a_model_streams_from_the_cache_and_its_next_start_converts_nothing(
    moe: Path, folder: ConvertedFolder, told: Callable[[], str]
) -> None:
    expected = forward(placed(moe), IDS)[0]
    first = placed(moe, STREAM)
    assert torch.equal(forward(first, IDS)[0], expected)
    assert {w.full for w in first.plan.converted} == {p.weight.full for p in first.plan.on(Tier.DISK)}
    assert first.plan.memory.host_bytes == 0
    assert told().count(CONVERTING) == 1
    (file,) = folder.path.glob(f"*/{FILE_NAME}")
    made_at = file.stat().st_mtime_ns
    again = placed(moe, STREAM)
    assert torch.equal(forward(again, IDS)[0], expected)
    said = told()
    assert CONVERTING not in said
    assert READING not in said
    assert file.stat().st_mtime_ns == made_at
    del first, again
    assert not folder.entries()[0].in_use


def test_layers_that_host_memory_does_not_hold_come_from_the_cache(tiny: MakeTiny) -> None:
    def run(**engine: object) -> tuple[list[torch.Tensor], Plan]:
        device = emulated()
        settings = settings_for({"prefetch": {"offload_group_size": 1}}, **engine)
        plan = make_plan(mapped(tiny("llama"), "bfloat16"), settings, device, context_tokens=CONTEXT)
        return passes(place(plan, device, debug=True))[0], plan

    expected, whole = run()
    assert whole.ring is not None
    found, limited = run(memory_limit_bytes=whole.memory.host_bytes // 2 + whole.ring.buffer_bytes)
    assert whole.converted == ()
    assert limited.converted
    assert limited.memory.host_bytes < whole.memory.host_bytes
    assert any("stay on disk" in note for note in limited.notes)
    assert all(map(torch.equal, found, expected))


@pytest.mark.real_model
def test_the_demo_model_answers_from_the_cache_as_from_memory(folder: ConvertedFolder) -> None:
    path = Path(__file__).parents[2] / "examples" / "demo_model.py"
    spec = importlib.util.spec_from_file_location("demo_model", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    model = module.demo_model_path()

    def answer(**limit: int) -> tuple[list[int], torch.Tensor, int]:
        engine = overspill.load(model, device="cpu", max_model_len=64, **limit)
        done = engine.generate(list(range(3, 20)), SamplingParams(max_tokens=3), logits=True, ignore_eos=True)
        assert done.logits is not None
        return done.token_ids, done.logits, len(engine.plan.converted)

    ids, logits, none = answer()
    limited_ids, limited_logits, some = answer(memory_limit_bytes=380 << 20)
    assert (none, some > 30) == (0, True)
    assert limited_ids == ids
    assert torch.equal(limited_logits, logits)
    assert folder.entries()[0].weights == some


# -- what is there already ---------------------------------------------------------------------------------------------


def test_another_choice_of_weights_adds_what_is_missing(moe: Path, folder: ConvertedFolder) -> None:
    model = mapped(moe)
    weights = to_convert(model)
    convert(weights[:3], model)
    both = convert(weights[1:5], model)
    assert sorted(entry.weights for entry in folder.entries()) == [2, 3]
    expected = resident(moe)
    assert values(both) == {w.full: expected[w.full] for w in weights[1:5]}


def test_the_plan_says_what_is_converted_and_what_the_cache_has(moe: Path, folder: ConvertedFolder) -> None:
    def note() -> str:
        (found,) = (note for note in planned(moe, STREAM).notes if "converted once" in note)
        return found

    assert "4 weights on disk (192.00 KiB)" in note()
    assert "2 decoded from Q8_0, 2 decoded from Q8_0, rearranged" in note()
    assert note().endswith(f"into the cache {folder.path}, which has none of them yet")
    assert not folder.path.exists(), "a plan writes nothing"
    model = mapped(moe)
    weights = [p.weight for p in planned(moe, STREAM).on(Tier.DISK)]
    convert(weights[:1], model)
    assert note().endswith("which is known to have 64.00 KiB of them: the checkpoint's content has not been read yet")
    convert(weights, model)
    assert note().endswith("which has them")
    folder.remove([entry.key for entry in folder.entries() if entry.weights == 1])
    assert note().endswith("which has 128.00 KiB of them yet")


def test_a_file_is_known_by_its_bytes(moe: Path, folder: ConvertedFolder, told: Callable[[], str]) -> None:
    first = values(all_converted(moe))
    stamp = moe.stat()
    os.utime(moe, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))
    told()
    assert values(all_converted(moe)) == first
    said = told()
    assert READING in said, "a new stamp"
    assert CONVERTING not in said, "and the same bytes"
    elsewhere = moe.with_name("copy.gguf")
    elsewhere.write_bytes(moe.read_bytes())
    all_converted(elsewhere)
    assert CONVERTING not in told()
    with moe.open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(bytes(range(200)))
    os.utime(moe, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 2_000_000))
    assert moe.stat().st_size == stamp.st_size
    changed = all_converted(moe)
    assert CONVERTING in told()
    assert values(changed) == resident(moe) != first
    assert sorted(entry.weights for entry in folder.entries()) == [1, len(first)], "only what changed"


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def foreign(file: Path) -> None:
    layout = lay_out([("w", "float32", (4,))], {"format": "pt"})
    file.write_bytes(layout.head + bytes(16))


def garbage(file: Path) -> None:
    file.write_bytes(b"\0" * 4096)


@pytest.mark.parametrize("damage", [cut, foreign, garbage, Path.unlink])
def test_a_damaged_entry_is_made_again(
    damage: Callable[[Path], None], moe: Path, folder: ConvertedFolder, told: Callable[[], str]
) -> None:
    expected = values(all_converted(moe))
    (file,) = folder.path.glob(f"*/{FILE_NAME}")
    damage(file)
    assert folder.entries()[0].damaged
    told()
    assert values(all_converted(moe)) == expected
    said = told()
    assert f"{file.parent.name[:12]} is removed: {file}" in said
    assert CONVERTING in said
    assert not folder.entries()[0].damaged


def test_an_entry_that_lost_its_mark_of_use_is_used_and_can_go(
    moe: Path, tmp_path: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    expected = values(all_converted(moe))
    (file,) = folder.path.glob(f"*/{FILE_NAME}")
    (file.parent / USED_NAME).unlink()
    assert (folder.entries()[0].damaged, folder.entries()[0].in_use) == (False, False)
    told()
    held = all_converted(moe)
    assert CONVERTING not in told()
    assert (values(held), folder.entries()[0].in_use) == (expected, True)
    del held
    (file.parent / USED_NAME).unlink()
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", str(folder.entries()[0].nbytes * 3 // 2))
    all_converted(save_gguf(tmp_path / "other.gguf", "qwen3moe", seed=1))
    assert "goes, to make room" in told()
    assert not file.exists()


def test_what_never_was_an_entry_is_left_alone_and_blocks_nothing(
    moe: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    folder.path.mkdir()
    blob, other = folder.path / ("a" * 64), folder.path / ("b" * 64)
    blob.write_bytes(bytes(100_000))
    other.mkdir()
    (other / "notes").write_text("mine")
    (folder.path / "poetry.lock").write_text("mine")
    (folder.path / "film.part").write_text("mine")
    found = {entry.key[0]: entry for entry in folder.entries()}
    assert all(entry.damaged and entry.foreign and not entry.in_use for entry in found.values())
    assert [found[key].nbytes for key in "ab"] == [100_000, 4]
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", str(280 << 10))  # does not hold both the blob and what is converted
    planned(moe, STREAM)
    streamed = placed(moe, STREAM)
    assert torch.equal(forward(streamed, IDS)[0], forward(placed(moe), IDS)[0])
    said = told()
    assert f"{'a' * 12} is no entry, and is left alone: {blob} is no folder but a file" in said
    assert f"{'b' * 12} is no entry, and is left alone: " in said
    assert (blob.stat().st_size, (other / "notes").read_text()) == (100_000, "mine")
    assert not (other / USED_NAME).exists()
    assert (folder.path / "poetry.lock").exists()
    assert (folder.path / "film.part").exists()


@pytest.mark.parametrize("as_folder", [True, False])
def test_an_entry_takes_its_place_from_what_is_foreign(as_folder: bool, moe: Path, folder: ConvertedFolder) -> None:
    expected = values(all_converted(moe))
    place = folder.path / folder.entry_keys()[0]
    folder.remove([place.name])
    if as_folder:
        place.mkdir()
    (place / "notes" if as_folder else place).touch()
    assert folder.entries()[0].foreign
    assert values(all_converted(moe)) == expected


def test_an_entry_under_another_s_key_is_damaged(moe: Path, folder: ConvertedFolder, told: Callable[[], str]) -> None:
    expected = values(all_converted(moe))
    place = folder.path / folder.entry_keys()[0]
    place.rename(place.with_name("0" * 64))
    assert folder.entries()[0].damaged
    assert values(all_converted(moe)) == expected
    assert "holds other weights than its folder's name says" in told()
    assert folder.entry_keys() == [place.name]


def test_a_file_that_changes_while_it_is_converted_leaves_no_entry(moe: Path, folder: ConvertedFolder) -> None:
    model = mapped(moe)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert(to_convert(model), model, progress=lambda _: os.utime(moe, ns=(0, 0)))
    assert (folder.entries(), parts(folder)) == ([], [])


def test_a_file_that_changes_while_it_is_hashed_is_not_known(
    moe: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hashed = mapped(moe), conversion_cache._hashed

    def changed(extents: Sequence[Extent]) -> dict[Extent, str]:
        found = hashed(extents)
        os.utime(moe, ns=(0, 0))
        return found

    monkeypatch.setattr(conversion_cache, "_hashed", changed)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert(to_convert(model), model)
    assert folder.index.known(moe, model.stamps[moe]) == {}


def to_entry(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


def to_nothing(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)
    place.symlink_to(elsewhere / "gone")


def to_file(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)
    place.symlink_to(elsewhere / FILE_NAME)


def weights_to_file(place: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    (place / FILE_NAME).rename(elsewhere / FILE_NAME)
    (place / FILE_NAME).symlink_to(elsewhere / FILE_NAME)


def mark_to_file(place: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    (elsewhere / FILE_NAME).touch()
    (place / USED_NAME).unlink()
    (place / USED_NAME).symlink_to(elsewhere / FILE_NAME)


@pytest.mark.parametrize("linked", [to_entry, to_nothing, to_file, weights_to_file, mark_to_file])
def test_a_link_in_an_entry_s_place_is_removed_and_not_followed(
    linked: Callable[[Path, Path], None], moe: Path, tmp_path: Path, folder: ConvertedFolder, told: Callable[[], str]
) -> None:
    expected = values(all_converted(moe))
    place, elsewhere = folder.path / folder.entry_keys()[0], tmp_path / "elsewhere"
    linked(place, elsewhere)
    before = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in elsewhere.iterdir()}
    (entry,) = folder.entries()
    assert (entry.damaged, entry.foreign, entry.in_use) == (True, False, False)
    told()
    assert values(all_converted(moe)) == expected
    assert "but a symbolic link" in told()
    assert not place.is_symlink()
    assert {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in elsewhere.iterdir()} == before


def test_a_link_is_removed_on_request_or_to_make_room(moe: Path, tmp_path: Path, folder: ConvertedFolder) -> None:
    all_converted(moe)
    place, elsewhere = folder.path / folder.entry_keys()[0], tmp_path / "elsewhere"
    to_entry(place, elsewhere)
    folder.remove([place.name])
    assert (folder.entry_keys(), len(list(elsewhere.iterdir()))) == ([], 2)
    place.symlink_to(elsewhere)
    folder.limit_bytes = place.lstat().st_size
    with new_entry(folder, "c" * 64, folder.limit_bytes):
        assert not place.is_symlink()
    assert len(list(elsewhere.iterdir())) == 2


def test_a_byte_that_changed_is_found_by_who_looks(moe: Path, folder: ConvertedFolder) -> None:
    converted = all_converted(moe)
    (key,) = folder.entry_keys()
    assert verify(folder, key) == []
    name, extent = [(name, source.extents[0]) for name, source in converted.sources.items()][1]
    with extent.file.open("r+b") as file:
        file.seek(extent.offset + extent.length - 1)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    assert not folder.entries()[0].damaged
    assert verify(folder, key) == [name]
    cut(extent.file)
    with pytest.raises(CheckpointError, match="file at"):
        verify(folder, key)


def test_the_hashes_of_what_is_cast_in_parts_are_the_whole_s(
    tiny: MakeTiny, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_cache, "_CHUNK_BYTES", 4096)
    expected = {hashlib.sha256(data).hexdigest() for data in values(all_converted(tiny("llama"), "bfloat16")).values()}
    (key,) = folder.entry_keys()
    with folder.reading(key) as contents:
        assert set(contents.sha256.values()) == expected
    assert verify(folder, key) == []


@settings(max_examples=25)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6, unique=True),
    chunk=st.integers(1, 30),
)
def test_hashes_are_those_of_the_bytes(
    spans: list[tuple[int, int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "hashed"
    file.write_bytes(bytes(range(100)))
    extents = [Extent(file, offset, length) for offset, length in spans]
    with pytest.MonkeyPatch.context() as small:
        small.setattr(conversion_cache, "_CHUNK_BYTES", chunk)
        found = conversion_cache._hashed(extents)
    for extent in extents:
        data = bytes(range(extent.offset, extent.offset + extent.length))
        assert found[extent] == hashlib.sha256(data).hexdigest()


DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])


@given(tensors=st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 9), max_size=3)), max_size=6))
def test_a_layout_is_aligned_and_a_safetensors_file(
    tensors: Sequence[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    named = [(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(tensors)]
    layout = lay_out(named, {"made": "here"})
    file = tmp_path_factory.getbasetemp() / "laid.safetensors"
    file.write_bytes(layout.head + bytes(layout.nbytes - len(layout.head)))
    records = read_shard(file).tensors
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"made": "here"}
        assert set(opened.keys()) == records.keys()
        for name, dtype, shape in named:
            assert (opened.get_tensor(name).shape, records[name].encoding.name) == (shape, dtype)
            assert records[name].extent.offset == layout.offsets[name]
            assert layout.offsets[name] % ALIGNMENT == 0
    assert all(name.startswith(PADDING[:9]) for name in records.keys() - {name for name, _, _ in named})


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_entry_not_used_for_longest_goes_and_one_in_use_stays(
    tmp_path: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch, told: Callable[[], str]
) -> None:
    paths = [save_gguf(tmp_path / f"{seed}.gguf", "qwen3moe", seed=seed) for seed in range(4)]
    held = all_converted(paths[0])
    all_converted(paths[1])
    all_converted(paths[2])
    all_converted(paths[1])  # used again
    size = folder.entries()[0].nbytes
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", str(size * 7 // 2))
    told()
    all_converted(paths[3])
    made_from = {Path(entry.made_from[0]).stem for entry in folder.entries()}
    assert made_from == {"0", "1", "3"}
    assert "goes, to make room" in told()
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", str(size * 3 // 2))
    with pytest.raises(CapacityError, match=r"do not fit the cache .*whose limit is .*beside .* in use") as refused:
        all_converted(paths[2])
    assert "OVERSPILL_CACHE_LIMIT" in (refused.value.hint or "")
    assert {Path(entry.made_from[0]).stem for entry in folder.entries()} == {"0", "1", "3"}, "nothing goes in vain"
    assert values(held) == resident(paths[0])


def test_what_cannot_fit_is_refused_by_the_plan(
    moe: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", "100KiB")
    with pytest.raises(CapacityError, match=r"disk: 192\.00 KiB of converted weights.*limit is 100\.00 KiB") as refused:
        planned(moe, STREAM)
    assert str(folder.path) in refused.value.message
    assert not folder.path.exists()
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", "much")
    with pytest.raises(ConfigError, match='"OVERSPILL_CACHE_LIMIT" is "much"'):
        planned(moe, STREAM)
    assert placed(moe).plan.converted == (), "who converts nothing is not asked"


def test_a_limit_of_zero_allows_no_conversion_but_what_is_there(
    moe: Path, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", "0")
    told = r"192\.00 KiB of weights must be converted .*OVERSPILL_CACHE_LIMIT=0 allows no conversion"
    with pytest.raises(CapacityError, match=told) as refused:
        planned(moe, STREAM)
    assert "more memory" in (refused.value.hint or "")
    with pytest.raises(CapacityError, match="OVERSPILL_CACHE_LIMIT=0 allows no conversion"):
        all_converted(moe)
    assert placed(moe).plan.converted == ()
    monkeypatch.delenv("OVERSPILL_CACHE_LIMIT")
    all_converted(moe)
    monkeypatch.setenv("OVERSPILL_CACHE_LIMIT", "0")
    assert len(placed(moe, STREAM).plan.converted) == 4


def test_a_folder_that_cannot_be_is_refused_by_name(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE_DIR", str(moe / "cache"))
    with pytest.raises(ConfigError, match=r"the conversion cache .*m\.gguf/cache cannot be written: Not a dir"):
        all_converted(moe)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_disk_that_fills_up_is_told_with_file_and_tensor_and_nothing_is_left(
    moe: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE_DIR", str(small_disk / "cache"))
    folder = ConvertedFolder.of_environment(os.environ)
    filler = small_disk / "filler"

    def fill_up(nbytes: int) -> None:
        with filler.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    model = mapped(moe)
    with pytest.raises(CapacityError, match=r"weights\.safetensors: writing model\.\S+ failed: No space left") as full:
        convert(to_convert(model), model, progress=fill_up)
    assert "OVERSPILL_CACHE_DIR" in (full.value.hint or "")
    assert (folder.entries(), parts(folder)) == ([], [])
    filler.write_bytes(bytes(900 << 10))
    with pytest.raises(CapacityError, match=r"do not fit the disk of the cache .*room for"):
        convert(to_convert(model), model)
    filler.unlink()
    assert values(convert(to_convert(model), model)) == resident(moe)


# -- several processes -------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from emulated_runs import mapped
from overspill.model.converted import needs_conversion
from overspill.offload.conversion_cache import convert

def progress(nbytes):
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "wait":
        sys.argv[2] = ""
        print("converting", flush=True)
        sys.stdin.readline()

model = mapped(Path(sys.argv[1]))
made = convert([w for w in model if needs_conversion(w)], model, progress=progress)
print(len(made.sources), flush=True)
"""


def child(path: Path, how: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_of_two_at_once_one_converts_and_the_other_waits_and_uses_it(
    moe: Path, folder: ConvertedFolder, told: Callable[[], str]
) -> None:
    with child(moe, "wait") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "converting\n"
        found: list[Converted] = []
        second = threading.Thread(target=lambda: found.append(all_converted(moe)))
        second.start()
        said = ""
        while "another process converts the same weights" not in said:
            assert second.is_alive()
            said += told()
            second.join(0.01)
        assert not found
        answered, _ = first.communicate("\n")
        second.join(60)
    assert int(answered) == len(found[0].sources)
    assert CONVERTING not in said + told()
    assert values(found[0]) == resident(moe)
    assert len(folder.entries()) == 1
    assert parts(folder) == []


def test_a_process_that_is_killed_leaves_nothing_that_is_used_or_stays(
    moe: Path, tmp_path: Path, folder: ConvertedFolder
) -> None:
    with child(moe, "die") as killed:
        assert killed.wait(120) == -signal.SIGKILL
    assert len(parts(folder)) == 2
    assert folder.entries() == []
    other = save_gguf(tmp_path / "other.gguf", "llama")
    all_converted(other)
    assert parts(folder) == [], "another conversion clears it away"
    assert values(all_converted(moe)) == resident(moe)
    assert len(folder.entries()) == 2


def test_what_a_killed_process_left_goes_without_its_lock_file_too(
    moe: Path, tmp_path: Path, folder: ConvertedFolder
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for part in (elsewhere, folder.path / f"{'c' * 64}.part", folder.path / f"{'d' * 64}.part"):
        part.mkdir(parents=True)
        (part / FILE_NAME).touch()
    (folder.path / f"{'c' * 64}.part" / USED_NAME).touch()
    (folder.path / f"{'e' * 64}.part").symlink_to(elsewhere)
    all_converted(moe)
    assert parts(folder) == []
    assert (elsewhere / FILE_NAME).exists()


def test_a_process_whose_lock_file_was_removed_is_neither_disturbed_nor_doubled(
    moe: Path, tmp_path: Path, folder: ConvertedFolder, told: Callable[[], str]
) -> None:
    model, writing, go_on = mapped(moe), threading.Event(), threading.Event()

    def progress(_: int) -> None:
        writing.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(convert, to_convert(model), model, progress=progress)
        try:
            assert writing.wait(60)
            (lock,) = folder.path.glob("*.lock")
            lock.unlink()
            all_converted(save_gguf(tmp_path / "other.gguf", "llama"))
            assert parts(folder) == [f"{lock.stem}.part"]
            told()
            second = threads.submit(all_converted, moe)
            said = ""
            while "another process converts the same weights" not in said and not second.done():
                wait([second], timeout=0.01)
                said += told()
        finally:
            go_on.set()
        assert values(first.result()) == values(second.result()) == resident(moe)
    assert "another process converts the same weights" in said
    assert CONVERTING not in said + told()
    assert parts(folder) == []


def test_who_lost_its_lock_file_removes_nobody_else_s(folder: ConvertedFolder) -> None:
    key = "f" * 64
    with ExitStack() as second:
        with making(folder, key):
            (lock,) = folder.path.glob("*.lock")
            lock.unlink()
            second.enter_context(making(folder, key))
        assert lock.exists()
    assert parts(folder) == []


def test_who_waited_for_a_file_that_is_removed_locks_the_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = lock_file(path)
    assert held is not None
    assert lock_file(path, wait=False) is None
    waits = threading.Event()
    got = []
    waiter = threading.Thread(target=lambda: got.append(lock_file(path, waiting=waits.set)))
    waiter.start()
    assert waits.wait(60)
    path.unlink()
    held.release()
    waiter.join(60)
    assert got[0] is not None
    assert lock_file(path, wait=False) is None
    got[0].release()
    assert lock_file(path, shared=True, create=False) is not None
    path.unlink()
    assert lock_file(path, create=False) is None
