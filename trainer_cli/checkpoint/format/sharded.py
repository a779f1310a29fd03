"""The default format written by several ranks, and read by any number of them.

    rank0.json                the state that the ranks have together; tensors by name
    rankN.safetensors         rank N's parts of these tensors, and its share of those that all have
    rankN.own.json            what rank N saves for itself (`PER_RANK`), with its tensors, which are small
    manifest.json             which file has which part of a tensor

A rank reads the files that have a part of what it needs, each once and whole, since a digest is of a whole file; into
memory comes what it needs.

The default format: one safetensors file a rank, and one JSON file for all that is no tensor.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.format import tree as codec
from trainer_cli.checkpoint.format.dtensor import Part, Target, Targets, distributed, is_dtensor, local_of, part_of
from trainer_cli.checkpoint.format.header import (
    TensorEntry,
    own_file,
    parsed_header,
    read_entries,
    state_file,
    tensor_file,
)
from trainer_cli.checkpoint.format.tensor_file import (
    DTYPES,
    FileLayout,
    bytes_of,
    check_booleans,
    identity,
    lay_out,
    memory_of,
    new_tensor,
)
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import DamagedCheckpoint, Manifest, new_digest
from trainer_cli.core.shards import PER_RANK, Shard, runs, spread, why_incomplete

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import ReadableFolder

RANKS = "ranks"
"""Key of a state that was read by another number of ranks: what each rank saved for itself."""
SMALL_BYTES = 65_536
"""Plain tensors up to this size, such as an optimizer's counts or the statistics of a batch norm, are not shared out
among the ranks. If tensors are sharded, each rank has them in its own file, and reads no other file for them."""


class ShardedFormat:
    """What one rank of several writes and reads.

    Args:
        rank, world_size: of this process.
        tensor_size: ranks in a row that have the same samples, and the same of each tensor that they do not divide.
    """

    name = "tensors"

    def __init__(self, rank: int, world_size: int, tensor_size: int = 1) -> None:
        self.rank, self.world_size, self.tensor_size = rank, world_size, tensor_size
        self.per_rank: Collection[str] = PER_RANK
        """The top-level keys of a state that every rank saves for itself, the same on all ranks."""

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        own = encode_own({key: value for key, value in tree.items() if key in self.per_rank})
        text, tensors = codec.encode({key: value for key, value in tree.items() if key not in self.per_rank})
        text = text if self.rank == 0 else b""
        layout = lay_out_rank(
            text, tensors, self.rank, self.world_size, tensor_size=self.tensor_size, shapes_only=shapes_only
        )
        return replace(layout, own=own)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        rank: int | None = None,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        rank = self.rank if rank is None else rank
        group = (self.world_size, self.tensor_size)
        return read_sharded(folder, manifest, only, targets, rank=rank, group=group)


def lay_out_rank(
    text: bytes,
    tensors: Mapping[str, codec.Leaf],
    rank: int,
    world_size: int,
    *,
    tensor_size: int = 1,
    shapes_only: bool = False,
) -> FileLayout:
    """What one rank writes of the state that all ranks have: its own parts, and its share of what others have too.

    Every rank has the same names in the same order, and finds the same shares without a word to the others.

    Args:
        tensor_size: as of `ShardedFormat`.
        shapes_only: as of `lay_out`.

    Raises:
        UnsavableState: naming what a file cannot hold.
    """
    everyone = tuple(range(world_size))
    sharded = any(map(is_dtensor, tensors.values()))
    own: dict[str, codec.Leaf] = {}
    shards: dict[str, Shard] = {}
    shared: dict[tuple[int, ...], dict[str, Part]] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        if is_dtensor(leaf) and not math.prod(leaf.shape):
            leaf = local_of(leaf).new_empty(leaf.shape)
        part = Part(leaf, Shard.all_of(leaf.shape), everyone)
        if is_dtensor(leaf):
            part = part_of(name, leaf, tensor_size)
        if part.shard.count and (memory := identity(part.leaf)) is not None:
            first = seen.setdefault(memory, name)
            if first != name:
                aliases[name] = first
                continue
        if part.shard.count or part.shard.is_whole:
            shared.setdefault(part.ranks, {})[name] = part
    for ranks, parts in shared.items():
        sizes = {name: part.leaf.nbytes for name, part in parts.items()}
        small = {name for name, part in parts.items() if part.shard.is_whole and sizes[name] <= SMALL_BYTES}
        writer = spread({name: size for name, size in sizes.items() if name not in small}, ranks)
        for name, part in parts.items():
            if writer.get(name, rank if sharded else 0) == rank:
                own[name], shards[name] = part.leaf, part.shard
    written = {alias: name for alias, name in aliases.items() if name in shards}
    return replace(lay_out(text, own, shapes_only=shapes_only), rank=rank, parts=shards, aliases=written)


def digest_parts(state: Mapping[str, Any]) -> dict[str, str]:
    """For each top-level key of a state a digest of its values, by which ranks learn whether theirs are equal.
    DTensors, of which each rank has a part, are left out.

    Raises:
        UnsavableState: naming the owner of what cannot be saved.
    """
    digests = {}
    for key, value in state.items():
        text, leaves = codec.encode({key: value})
        digest = new_digest(DigestAlgorithm.xxh3_128)
        digest.update(text)
        for name, leaf in leaves.items():
            if not is_dtensor(leaf):
                lay_out(b"", {name: leaf})  # Refuses what has no bytes.
                digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
                digest.update(bytes_of(leaf).data)
        digests[key] = digest.hexdigest()
    return digests


def keys_of_each(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The top-level keys whose values differ among ranks, by the `digest_parts` of each."""
    keys = dict.fromkeys(key for of_rank in digests for key in of_rank)
    return [key for key in keys if len({of_rank.get(key) for of_rank in digests}) > 1]


def why_uncovered(
    wanted: Collection[str], shards: Mapping[str, Mapping[str, Shard]], aliases: Mapping[str, str]
) -> str | None:
    """Why the files of all ranks do not hold every tensor of a state as a whole; None if they do.

    Args:
        wanted: the names of the state's tensors.
        shards: file -> the parts in it.
        aliases: name of a tied tensor -> the name under which it is stored.
    """
    parts: dict[str, list[Shard]] = {}
    for of_file in shards.values():
        for name, part in of_file.items():
            parts.setdefault(name, []).append(part)
    for name in wanted:
        if aliases.get(name, name) not in parts:
            return f"no rank has written {name}"
    problems = ((name, why_incomplete(found)) for name, found in parts.items())
    return next((f"{name}: {problem}" for name, problem in problems if problem), None)


def is_sharded(manifest: Manifest) -> bool:
    """Whether several ranks saved a checkpoint of the default format."""
    return own_file(0) in manifest.files


def encode_own(state: Mapping[str, Any]) -> bytes:
    """What a rank saves for itself as JSON, its tensors as type, shape and bytes."""
    text, leaves = codec.encode(state)
    layout = lay_out(b"", leaves)
    content = {
        "state": text.decode("ascii"),
        "tensors": base64.b64encode(layout.header + b"".join(bytes_of(one.leaf).data for one in layout.spans)).decode(),
        "aliases": layout.aliases,
    }
    return json.dumps(content).encode("ascii")


def decode_own(text: bytes, only: Collection[str] | None = None) -> dict[str, Any]:
    """Read what `encode_own` writes.

    Raises:
        Undecodable: saying why.
    """
    try:
        content = json.loads(text)
        file = io.BytesIO(base64.b64decode(content["tensors"], validate=True))
        tensors = {}
        for entry in read_entries(file.read, len(file.getbuffer())):
            tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.code])
            file.readinto(memory_of(tensors[entry.name])) if entry.size_bytes else 0
        decoder = codec.decode(content["state"].encode("ascii"), only)
        return decoder.tree({name: tensors[content["aliases"].get(name, name)] for name in decoder.wanted})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise codec.Undecodable(f"what a rank saved for itself is not what was written: {error}") from None


@dataclass(slots=True)
class _Wanted:
    """A tensor that is read, or the part of it that this rank needs."""

    shard: Shard
    target: Target | None = None
    tensor: torch.Tensor | None = None
    from_files: dict[str, Shard] = field(default_factory=dict)
    """File -> the part that is read from it."""


def read_sharded(
    folder: ReadableFolder,
    manifest: Manifest,
    only: Collection[str] | None,
    targets: Targets | None = None,
    *,
    rank: int = 0,
    group: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """The state as saved by any number of ranks; of tensors that `targets` knows, this rank's part.

    What a rank saved for itself comes back to it. If another number of ranks saved, or other tensor groups, `RANKS` is
    a list of what each saved for itself; of a tensor group, where all have the same, the first.

    Args:
        group: the number of ranks, and of those in a tensor group.

    Raises:
        DamagedCheckpoint: naming the file that is not what was written.
    """
    try:
        decoder = codec.decode(_content(folder, manifest, state_file(0)), only)
        aliases = {alias: name for table in manifest.aliases.values() for alias, name in table.items()}
        stored = {name: aliases.get(name, name) for name in decoder.wanted}
        parts = _parts_of(folder, manifest)
        wanted: dict[str, _Wanted] = {}
        whole = {stored[view.base] for view in decoder.views.values()}
        for name, source in stored.items():
            if source not in parts:
                raise codec.Undecodable(f"the tensor {source[:80]!r} is in none of the files")
            if source not in wanted:
                target_of = None if source in whole else targets
                wanted[source] = _wanted(name, parts[source], target_of, tensor_file(rank))
        for file in manifest.files:
            if here := {name: one for name, one in wanted.items() if file in one.from_files}:
                _read_parts(folder, manifest, file, here)
        found = {name: _finished(folder, name, one) for name, one in wanted.items()}
        tree = decoder.tree({name: found[stored[name]] for name in decoder.wanted})
        if whole and targets is not None:
            tree = distributed(tree, targets)
        if only is None or any(key not in tree for key in only):
            tree |= _own_states(folder, manifest, only, rank, group)
        return tree
    except codec.Undecodable as error:
        where = str(folder.path / state_file(0))
        raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None


def _content(folder: ReadableFolder, manifest: Manifest, file_name: str) -> bytes:
    with VerifiedFile(folder, manifest, file_name) as file:
        return file.rest()


def _own_states(
    folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None, rank: int, group: tuple[int, int]
) -> dict[str, Any]:
    """What this rank saved for itself, or rank 0's and a list of all if another number of ranks saved."""
    if not is_sharded(manifest):
        return {} if group[0] == 1 else {RANKS: []}
    if (manifest.world_size, manifest.tensor_size) == group:
        return decode_own(_content(folder, manifest, own_file(rank)), only)
    firsts = range(0, manifest.world_size, manifest.tensor_size)
    ranks = [decode_own(_content(folder, manifest, own_file(one)), only) for one in firsts]
    return {**ranks[0], RANKS: ranks}


def _parts_of(folder: ReadableFolder, manifest: Manifest) -> dict[str, dict[str, Shard]]:
    """For each stored tensor that belongs to all ranks: file -> the part of it there."""
    shards: Mapping[str, Mapping[str, Shard]] = manifest.shards
    if not is_sharded(manifest):
        opened = VerifiedFile(folder, manifest, tensor_file(0))
        with opened.peeked():
            shards = {tensor_file(0): {one.name: Shard.all_of(one.shape) for one in parsed_header(opened)}}
    parts: dict[str, dict[str, Shard]] = {}
    for file, of_file in shards.items():
        for name, part in of_file.items():
            parts.setdefault(name, {})[file] = part
    return parts


def _wanted(name: str, parts: Mapping[str, Shard], targets: Targets | None, own_file: str) -> _Wanted:
    """What this rank needs of a tensor, and the files that it comes from; of copies, the one in the rank's own file."""
    if problem := why_incomplete(parts.values()):
        raise codec.Undecodable(f"the tensor {name[:80]!r} is not there as a whole: {problem}")
    shape = next(iter(parts.values())).shape
    keys = tuple(key.replace("~1", "/").replace("~0", "~") for key in name.split("/"))
    target = None if targets is None else targets(keys, shape)
    needed = Shard.all_of(shape) if target is None else target.shard
    one = _Wanted(needed, target)
    taken: set[Shard] = set()
    for file in sorted(parts, key=lambda file: (file != own_file, file)):
        part = parts[file]
        if part not in taken and (any(True for _ in runs(part, needed)) or (not needed.count and not taken)):
            one.from_files[file] = part
            taken.add(part)
    return one


def _read_parts(folder: ReadableFolder, manifest: Manifest, file_name: str, wanted: Mapping[str, _Wanted]) -> None:
    """Read those parts of tensors from one file. The whole file is digested, unless only its header is needed."""
    file = VerifiedFile(folder, manifest, file_name)
    empty = not any(one.shard.count for one in wanted.values())
    with file.peeked() if empty else file:
        layout = parsed_header(file)
        there = {entry.name: entry for entry in layout}
        for name, one in wanted.items():
            part, entry = one.from_files[file_name], there.get(name)
            if entry is None:
                raise file.damaged(f"it lacks the tensor {name[:80]!r}")
            if part.sizes != entry.shape:
                raise file.damaged(f"{name[:80]!r} is not the part of the tensor that the manifest says")
            _make(file, one, entry)
        if not empty:
            file.read(_places(layout, wanted, file_name))


def _make(file: VerifiedFile, one: _Wanted, entry: TensorEntry) -> None:
    """Memory for what this rank needs of a tensor."""
    if one.tensor is None:
        one.tensor = new_tensor(file, entry, one.shard.sizes)
    elif one.tensor.dtype is not DTYPES[entry.code]:
        raise file.damaged(f"{entry.name[:80]!r} is of another type in another file")


def _places(layout: list[TensorEntry], wanted: Mapping[str, _Wanted], file_name: str) -> Iterator[memoryview | int]:
    """For the bytes of a file, in order: the memory that they are for, or how many of them are not needed."""
    for entry in layout:
        one = wanted.get(entry.name)
        if one is None or one.tensor is None or not one.tensor.numel():
            if entry.size_bytes:
                yield entry.size_bytes
            continue
        source, needed = one.from_files[file_name], one.shard
        memory, element_bytes, at = memory_of(one.tensor), one.tensor.element_size(), 0
        for begin, to, count in runs(source, needed):
            if begin > at:
                yield (begin - at) * element_bytes
            yield memory[to * element_bytes : (to + count) * element_bytes]
            at = begin + count
        if at < source.count:
            yield (source.count - at) * element_bytes


def _finished(folder: ReadableFolder, name: str, one: _Wanted) -> Any:
    assert one.tensor is not None, "every wanted tensor is in a file"
    check_booleans(folder.path / next(iter(one.from_files)), name, one.tensor)
    return one.tensor if one.target is None else one.target.wrap(one.tensor)


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors and overlapping views are in it once.

    Tensors are written straight from their memory, without holes between them; the header is padded so that they begin
    at a multiple of 4,096 bytes. They come back as plain tensors on the CPU: contiguous, each with memory of its own,
    but for views, which share it.
    """

    name = "tensors"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        return lay_out(*codec.encode(tree), shapes_only=shapes_only)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        rank: int = 0,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        if is_sharded(manifest) or targets is not None:
            return read_sharded(folder, manifest, only, targets)
        with VerifiedFile(folder, manifest, state_file(rank)) as file:
            text = file.rest()
        try:
            decoder = codec.decode(text, only)
            return decoder.tree(_read_tensors(folder, manifest, tensor_file(rank), decoder.wanted))
        except codec.Undecodable as error:
            where = str(folder.path / state_file(rank))
            raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None


def _read_tensors(
    folder: ReadableFolder, manifest: Manifest, file_name: str, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """The tensors of these names; tied ones are one tensor. The whole file is digested."""
    aliases = manifest.aliases.get(file_name, {})
    stored = {name: aliases.get(name, name) for name in wanted}
    found = read_file(folder, manifest, file_name, set(stored.values()))
    if missing := set(stored.values()) - found.keys() | set(stored.values()) & set(aliases):
        what = f"a file of the checkpoint is damaged: it lacks the tensor {min(missing)[:80]!r}"
        raise DamagedCheckpoint(what, where=str(folder.path / file_name))
    return {name: found[stored[name]] for name in wanted}


def read_file(
    folder: ReadableFolder, manifest: Manifest, file_name: str, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """Those of these tensors that a file has. The whole file is digested."""
    with VerifiedFile(folder, manifest, file_name) as file:
        layout = parsed_header(file)
        found = {entry.name: new_tensor(file, entry, entry.shape) for entry in layout if entry.name in kept}
        file.read(memory_of(found[e.name]) if e.name in kept else e.size_bytes for e in layout if e.size_bytes)
    for name, tensor in found.items():
        check_booleans(file.path, name, tensor)
    return found
