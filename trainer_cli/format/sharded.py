"""The default format: one safetensors file a rank and one JSON file for all other values, read by any number of ranks.

    rank0.json                the state that all ranks share; tensors by name
    rankN.safetensors         rank N's parts of these tensors, and its share of the replicated ones
    rankN.frozen.safetensors  those of them that are not trained, if they are large: a link to the file of the
                              checkpoint before, if that has the same bytes
    rankN.own.json            with several ranks: states that rank N saves for itself (`PER_RANK`), with small tensors
    manifest.json             with several ranks: the parts of tensors in each file

A rank reads the files that contain a part of what it needs, each once and whole, since a digest covers a whole file.
Only the parts that it needs are kept in memory.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from trainer_cli.dtensor import Part, Target, Targets, distributed, is_dtensor, local_of, part_of
from trainer_cli.format import tree as codec
from trainer_cli.format.base import Format
from trainer_cli.format.file_layout import FileLayout, lay_out
from trainer_cli.format.rank_files import FilesOfRank, tensor_files
from trainer_cli.layout import PER_RANK, PartTable, Shard, spread
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.tensor_files import (
    DTYPES,
    Destination,
    Leaf,
    TensorEntry,
    VerifiedFile,
    bytes_of,
    check_booleans,
    memory_key,
    memory_of,
    new_tensor,
    read_entries,
    read_tensors,
    read_verified,
)

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder
    from trainer_cli.tensor_files import LiveTensors

RANKS = "ranks"
"""Key of a state that was read by another number of ranks: a list of what each rank saved for itself."""
SMALL_BYTES = 65_536
"""Maximum size of plain tensors that are not divided among the ranks, such as an optimizer's step counts. If other
tensors are sharded, each rank writes these to its own file, so that it reads no other file for them."""


@runtime_checkable
class DividedFormat(Format, Protocol):
    """A format whose tensors may be divided among ranks: it reads the part of a tensor that has a target."""

    def of_rank(self, sharded: ShardedFormat) -> Format:
        """The format of one rank of a distributed run."""
        ...

    def files_of(self, folder: ReadableFolder, manifest: Manifest) -> tuple[ReadableFolder, Manifest]:
        """The files of the default format, and the manifest that lists them."""
        ...

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        """See `StateReader.read`."""
        ...


class _TensorFiles:
    """Base of the formats for one process and for a rank of a distributed run, which have the same files."""

    name = "tensors"

    def of_rank(self, sharded: ShardedFormat) -> ShardedFormat:
        """See `DividedFormat.of_rank`."""
        return sharded

    def files_of(self, folder: ReadableFolder, manifest: Manifest) -> tuple[ReadableFolder, Manifest]:
        """The arguments: the files are those of the default format."""
        return folder, manifest

    def read_values(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str]) -> dict[str, Any]:
        """See `Format.read_values`. No tensor file is read, because its digest is that of the whole file."""
        with decoded_state(folder, manifest, only) as decoder:
            values = decoder.values()
            if is_sharded(manifest):
                values |= decode_own(read_verified(folder, manifest, FilesOfRank(0).own), only)
        return values


class ShardedFormat(_TensorFiles):
    """The files of one rank of a distributed run.

    Args:
        rank, world_size: of this process.
        tensor_size: number of consecutive ranks that form a tensor-parallel group. They have the same samples, and the
            same copy of each tensor that they do not divide.
    """

    def __init__(self, rank: int, world_size: int, tensor_size: int = 1) -> None:
        self.rank, self.world_size, self.tensor_size = rank, world_size, tensor_size
        self.per_rank: Collection[str] = PER_RANK
        """The top-level keys of a state that every rank saves for itself; equal on all ranks."""

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """The layout of this rank's files, see `Format.plan`."""
        per_rank = encode_own({key: value for key, value in tree.items() if key in self.per_rank})
        text, tensors = codec.encode({key: value for key, value in tree.items() if key not in self.per_rank})
        # The text is the same on all ranks, so that one writes it.
        text = text if self.rank == 0 else b""
        layout = lay_out_rank(
            text, tensors, self.rank, self.world_size, tensor_size=self.tensor_size, shapes_only=shapes_only
        )
        return replace(layout, per_rank=per_rank)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        """See `read_sharded`."""
        group = (self.world_size, self.tensor_size)
        return read_sharded(folder, manifest, only, targets, rank=self.rank, group=group)


def lay_out_rank(
    text: bytes,
    tensors: Mapping[str, Leaf],
    rank: int,
    world_size: int,
    *,
    tensor_size: int = 1,
    shapes_only: bool = False,
) -> FileLayout:
    """The layout of one rank's files of a shared state: its parts of sharded tensors, and its share of replicated ones.

    Every rank has the same names in the same order, so all compute the same shares without communication.

    Args:
        tensor_size: see `ShardedFormat`.
        shapes_only: see `lay_out`.

    Raises:
        UnsavableState: a tensor cannot be saved; the message names it.
    """
    all_ranks = tuple(range(world_size))
    has_sharded = any(map(is_dtensor, tensors.values()))
    leaves: dict[str, Leaf] = {}
    shards: dict[str, Shard] = {}
    parts_of_ranks: dict[tuple[int, ...], dict[str, Part]] = {}
    aliases: dict[str, str] = {}
    name_of_memory: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        if is_dtensor(leaf) and not math.prod(leaf.shape):
            # Without elements there is nothing to divide, so it is written like a replicated tensor.
            leaf = local_of(leaf).new_empty(leaf.shape)
        if is_dtensor(leaf):
            local_part = part_of(name, leaf, tensor_size)
        else:
            local_part = Part(leaf, Shard.all_of(leaf.shape), all_ranks)
        # Tied tensors are stored once, under the first name.
        if local_part.shard.count and (memory := memory_key(local_part.leaf)) is not None:
            first_name = name_of_memory.setdefault(memory, name)
            if first_name != name:
                aliases[name] = first_name
                continue
        if local_part.shard.count or local_part.shard.is_whole:
            parts_of_ranks.setdefault(local_part.ranks, {})[name] = local_part
    for ranks, parts in parts_of_ranks.items():
        sizes = {name: local_part.leaf.nbytes for name, local_part in parts.items()}
        small = {name for name, local_part in parts.items() if local_part.shard.is_whole and sizes[name] <= SMALL_BYTES}
        writer_of = spread({name: size for name, size in sizes.items() if name not in small}, ranks)
        for name, local_part in parts.items():
            if writer_of.get(name, rank if has_sharded else 0) == rank:
                leaves[name], shards[name] = local_part.leaf, local_part.shard
    # Aliases of tensors that other ranks write are with the files of those ranks.
    written = {alias: name for alias, name in aliases.items() if name in shards}
    return replace(lay_out(text, leaves, shapes_only=shapes_only), rank=rank, parts=shards, aliases=written)


def is_sharded(manifest: Manifest) -> bool:
    """Whether several ranks saved a checkpoint of the default format."""
    return FilesOfRank(0).own in manifest.files


def encode_own(state: Mapping[str, Any]) -> bytes:
    """Encode the states that a rank saves for itself as JSON; tensors as a safetensors file in base64."""
    text, leaves = codec.encode(state)
    layout = lay_out(b"", leaves)
    tensors = layout.header + b"".join(bytes_of(span.leaf).data for span in layout.spans)
    content = {"state": text.decode("ascii"), "tensors": base64.b64encode(tensors).decode(), "aliases": layout.aliases}
    return json.dumps(content).encode("ascii")


def decode_own(text: bytes, only: Collection[str] | None = None) -> dict[str, Any]:
    """Decode the output of `encode_own`.

    Raises:
        Undecodable: the text is damaged; the message gives the reason.
    """
    try:
        content = json.loads(text)
        # Without `validate`, base64 skips characters that it does not know.
        file = io.BytesIO(base64.b64decode(content["tensors"], validate=True))
        tensors = {}
        for entry in read_entries(file.read, len(file.getbuffer())):
            tensors[entry.name] = torch.empty(entry.shape, dtype=DTYPES[entry.code])
            if entry.size_bytes:
                file.readinto(memory_of(tensors[entry.name]))
        decoder = codec.decode(content["state"].encode("ascii"), only)
        return decoder.tree({name: tensors[content["aliases"].get(name, name)] for name in decoder.wanted})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise codec.Undecodable(f"what a rank saved for itself is not what was written: {error}") from None


@contextmanager
def decoded_state(folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None) -> Iterator[codec.Decoder]:
    """The state that all ranks share, for a block that reads the tensors in it.

    Raises:
        DamagedCheckpoint: its file differs from its digest or cannot be decoded, or the block raised `Undecodable`.
    """
    text = read_verified(folder, manifest, FilesOfRank(0).state)
    try:
        yield codec.decode(text, only)
    except codec.Undecodable as error:
        where = str(folder.path / FilesOfRank(0).state)
        raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None


@dataclass(slots=True)
class _Request:
    """A tensor that this rank reads, whole or in part."""

    shard: Shard
    """The part that this rank needs."""
    target: Target | None = None
    tensor: torch.Tensor | None = None
    """Memory for the part; None until the header of the first file was read."""
    sources: Mapping[str, Shard] = field(default_factory=dict)
    """File -> the part of the tensor in it."""


def read_sharded(
    folder: ReadableFolder,
    manifest: Manifest,
    only: Collection[str] | None,
    targets: Targets | None = None,
    *,
    rank: int = 0,
    group: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """The state as saved by any number of ranks. Of a tensor with a target, only this rank's part is read.

    Each rank gets the states that it saved for itself. If the number of ranks or the size of tensor groups has changed,
    `RANKS` is a list of what each rank saved for itself, or each tensor group, whose ranks save the same.

    Args:
        group: the number of ranks, and the size of a tensor group.

    Raises:
        DamagedCheckpoint: a file differs from its digest; the message names it.
    """
    with decoded_state(folder, manifest, only) as decoder:
        aliases = {alias: name for table in manifest.aliases.values() for alias, name in table.items()}
        stored = {name: aliases.get(name, name) for name in decoder.wanted}
        shards = _shards_by_name(folder, manifest)
        requests: dict[str, _Request] = {}
        choice = _SourceChoice(FilesOfRank(rank).with_tensors)
        # A view may need any element of its base, so bases are read whole, and divided afterwards.
        bases = {stored[view.base] for view in decoder.views.values()}
        for name, source in stored.items():
            if source not in shards:
                raise codec.Undecodable(f"the tensor {source[:80]!r} is in none of the files")
            if source not in requests:
                target_of = None if source in bases else targets
                requests[source] = _new_request(name, shards[source], target_of, choice)
        # By file, not by tensor: each file is read once, since a digest covers the whole of it.
        by_file: dict[str, dict[str, _Request]] = {}
        for source, request in requests.items():
            for file in request.sources:
                by_file.setdefault(file, {})[source] = request
        for file in manifest.files:
            if file in by_file:
                _read_shards(folder, manifest, file, by_file[file])
        tensors = {name: _finish(folder, name, request) for name, request in requests.items()}
        tree = decoder.tree({name: tensors[stored[name]] for name in decoder.wanted})
        if bases and targets is not None:
            tree = distributed(tree, targets)
        # What each rank saved for itself is read only if a requested key is not among the shared ones.
        if only is None or any(key not in tree for key in only):
            tree |= _read_per_rank_states(folder, manifest, only, rank, group)
        return tree


def _read_per_rank_states(
    folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None, rank: int, group: tuple[int, int]
) -> dict[str, Any]:
    """The states that this rank saved for itself. If the group has changed: those of rank 0, and as `RANKS` a list of
    the states of all ranks, or of the first rank of each tensor group."""
    if not is_sharded(manifest):
        return {} if group[0] == 1 else {RANKS: []}
    if (manifest.world_size, manifest.tensor_size) == group:
        return decode_own(read_verified(folder, manifest, FilesOfRank(rank).own), only)
    first_ranks = range(0, manifest.world_size, manifest.tensor_size)
    rank_states = [decode_own(read_verified(folder, manifest, FilesOfRank(first).own), only) for first in first_ranks]
    return {**rank_states[0], RANKS: rank_states}


def _shards_by_name(folder: ReadableFolder, manifest: Manifest) -> Mapping[str, Mapping[str, Shard]]:
    """Name of a tensor -> file -> the part of the tensor in it, see `PartTable.by_name`."""
    shards = manifest.shards
    if not is_sharded(manifest):
        shards = {}
        for name in tensor_files(manifest, 0):
            file = VerifiedFile(folder, manifest, name)
            # The header alone: the file is digested when its tensors are read.
            with file.without_digest():
                shards[name] = {entry.name: Shard.all_of(entry.shape) for entry in file.read_entries()}
    return PartTable.of(shards).by_name()


class _SourceChoice:
    """The files from which a rank reads its parts of tensors, chosen once for all tensors with equal parts.

    If there are several copies, the one in a preferred file is read: the rank reads these files anyway.
    """

    def __init__(self, preferred_files: Collection[str]) -> None:
        self._preferred_files = preferred_files
        self._problems: dict[int, str | None] = {}
        self._sources: dict[tuple[int, Shard], dict[str, Shard]] = {}

    def why_incomplete(self, shards: Mapping[str, Shard]) -> str | None:
        """See `Shard.why_incomplete`; `shards` comes from `PartTable.by_name`."""
        if id(shards) not in self._problems:
            self._problems[id(shards)] = Shard.why_incomplete(shards.values())
        return self._problems[id(shards)]

    def sources(self, shards: Mapping[str, Shard], needed: Shard) -> dict[str, Shard]:
        """File -> the part in it, for the files to read."""
        if (id(shards), needed) not in self._sources:
            sources: dict[str, Shard] = {}
            chosen: set[Shard] = set()
            for file in sorted(shards, key=lambda file: (file not in self._preferred_files, file)):
                shard = shards[file]
                has_needed = any(True for _ in shard.runs(needed))
                # A rank that needs no element still reads one header, for the type of the tensor.
                is_for_type = not needed.count and not chosen
                if shard not in chosen and (has_needed or is_for_type):
                    sources[file] = shard
                    chosen.add(shard)
            self._sources[id(shards), needed] = sources
        return self._sources[id(shards), needed]


def _new_request(name: str, shards: Mapping[str, Shard], targets: Targets | None, choice: _SourceChoice) -> _Request:
    """The part of a tensor that this rank needs, and the files to read it from."""
    if problem := choice.why_incomplete(shards):
        raise codec.Undecodable(f"the tensor {name[:80]!r} is incomplete: {problem}")
    shape = next(iter(shards.values())).shape
    keys = tuple(key.replace("~1", "/").replace("~0", "~") for key in name.split("/"))
    target = None if targets is None else targets(keys, shape)
    needed = Shard.all_of(shape) if target is None else target.shard
    return _Request(needed, target, sources=choice.sources(shards, needed))


def _read_shards(folder: ReadableFolder, manifest: Manifest, file_name: str, requests: Mapping[str, _Request]) -> None:
    """Read the requested parts of tensors from a file. The whole file is digested, unless only its header is needed."""
    file = VerifiedFile(folder, manifest, file_name)
    header_only = not any(request.shard.count for request in requests.values())
    with file.without_digest() if header_only else file:
        layout = file.read_entries()
        entries = {entry.name: entry for entry in layout}
        for name, request in requests.items():
            shard, entry = request.sources[file_name], entries.get(name)
            if entry is None:
                raise file.damaged(f"it lacks the tensor {name[:80]!r}")
            if shard.sizes != entry.shape:
                raise file.damaged(f"{name[:80]!r} is another part of the tensor than the manifest says")
            if request.tensor is None:
                request.tensor = new_tensor(file, entry, request.shard.sizes)
            elif request.tensor.dtype is not DTYPES[entry.code]:
                raise file.damaged(f"{name[:80]!r} is of another type in another file")
        if not header_only:
            file.read(_destinations(layout, requests, file_name))


def _destinations(layout: list[TensorEntry], requests: Mapping[str, _Request], file_name: str) -> Iterator[Destination]:
    """The destinations of the bytes of a file, in order."""
    for entry in layout:
        request = requests.get(entry.name)
        if request is None or request.tensor is None or not request.tensor.numel():
            # Bytes that are not needed are also read, since the digest covers them.
            if entry.size_bytes:
                yield entry.size_bytes
            continue
        source, needed = request.sources[file_name], request.shard
        memory, element_bytes, position = memory_of(request.tensor), request.tensor.element_size(), 0
        # Runs of elements: where each begins in the file and in the tensor, and its length.
        for source_start, start, count in source.runs(needed):
            if source_start > position:
                yield (source_start - position) * element_bytes
            yield memory[start * element_bytes : (start + count) * element_bytes]
            position = source_start + count
        if position < source.count:
            yield (source.count - position) * element_bytes


def _finish(folder: ReadableFolder, name: str, request: _Request) -> Any:
    """The tensor of a request, as a DTensor if it has a target."""
    assert request.tensor is not None, "every requested tensor is in a file"
    check_booleans(folder.path / next(iter(request.sources)), name, request.tensor)
    return request.tensor if request.target is None else request.target.wrap(request.tensor)


class TensorsFormat(_TensorFiles):
    """Any safetensors reader can open the tensor file; tied tensors and overlapping views are stored once.

    Tensors are written from their memory, without holes between them; the header is padded so that they begin at a
    multiple of 4,096 bytes. They are read as plain tensors on the CPU: contiguous, and each with memory of its own,
    except views, which share it.
    """

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """The layout of all tensors in one file, see `Format.plan`."""
        return lay_out(*codec.encode(tree), shapes_only=shapes_only)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        targets: Targets | None = None,
        live: LiveTensors | None = None,
    ) -> dict[str, Any]:
        """The state as saved, see `StateReader.read`.

        Args:
            live: tensors of a live state: those that match are in the result instead of new ones, and the caller fills
                them by `live.read`.
        """
        if is_sharded(manifest) or targets is not None:
            return read_sharded(folder, manifest, only, targets)
        with decoded_state(folder, manifest, only) as decoder:
            aliases = manifest.aliases.get(FilesOfRank(0).tensors, {})
            if live is not None:
                views = decoder.views
                shared = {*aliases, *aliases.values(), *views, *(view.base for view in views.values())}
                live.match(decoder.names(), shared)
            stored = {name: aliases.get(name, name) for name in decoder.wanted}
            sources = set(stored.values())
            tensors: dict[str, torch.Tensor] = {}
            for file in tensor_files(manifest, 0):
                tensors |= read_tensors(folder, manifest, file, sources, live)
            # An alias leads to a stored tensor, never to another alias.
            if missing := sources - tensors.keys() | sources & set(aliases):
                where = folder.path / FilesOfRank(0).tensors
                raise DamagedCheckpoint.of_file(where, f"it lacks the tensor {min(missing)[:80]!r}")
            return decoder.tree({name: tensors[stored[name]] for name in decoder.wanted})
