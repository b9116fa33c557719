"""The head of a GGUF file: metadata and tensor table, over one shared read-only map.

Owns parsing and every bounds check: a file that opens here is complete. Opened through `gguf/parts.py`; read
by the model config, the GGUF tokenizer and the weight reader. It must not import torch or numpy, nor copy
tensor data.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeVar

from sglang.srt.configs.gguf.types import GGML_TYPES, GGMLType

T = TypeVar("T")
D = TypeVar("D")

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type -> struct code. Types 7 (bool), 8 (string) and 9 (array) are handled by name.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SCALAR_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# The smallest possible record of each table: a count above what fits in the file is corrupt, not big.
_MIN_METADATA_RECORD = 8 + 4 + 1
_MIN_TENSOR_RECORD = 8 + 4 + 4 + 8
# Arrays inside arrays are read by recursion, and no real file nests them deeper than this.
_DEEPEST_ARRAY = 8


class GGUFTensorInfo(NamedTuple):
    """One entry of the tensor table.

    `shape` is row-major (rows first), `offset` counts from the start of the file at `path`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    path: pathlib.Path
    offset: int
    nbytes: int


class _Deferred(NamedTuple):
    """An array that is decoded when somebody asks for it."""

    element_type: int
    length: int
    position: int


class GGUFMetadata(Mapping[str, object]):
    """Metadata by key. Scalars and strings are plain values; an array becomes a list at its first read."""

    def __init__(self, reader: _Reader, entries: dict[str, object]) -> None:
        self._reader = reader
        self._entries = entries

    def __getitem__(self, key: str) -> object:
        value = self._entries[key]
        if isinstance(value, _Deferred):
            value, _ = self._reader.array(value, f"metadata {key!r}")
            self._entries[key] = value
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class GGUFHeader:
    """Metadata and tensor table of one file.

    Opening maps the file and checks that every tensor lies inside it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self.file_size = len(self._map)
        reader = _Reader(path, self._map)
        self.version = reader.preamble()
        tensor_count, position = reader.u64(8, "the number of tensors")
        metadata_count, position = reader.u64(position, "the number of metadata entries")
        reader.check_count("metadata entries", metadata_count, _MIN_METADATA_RECORD)
        reader.check_count("tensors", tensor_count, _MIN_TENSOR_RECORD)
        entries, position = reader.metadata(position, metadata_count)
        self.metadata = GGUFMetadata(reader, entries)
        self.alignment = self._read_alignment(entries)
        table, position = reader.tensor_table(position, tensor_count)
        self.data_start = -(-position // self.alignment) * self.alignment
        self.tensors = self._place_tensors(table)
        self._spans = {path: (self._map, self.data_start)}

    def join(self, part: GGUFHeader) -> None:
        """Take over the tensors of another part of the same model, but not its metadata."""
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise ValueError(
                    f"{part.path}: tensor {name!r} is also in {self.tensors[name].path}; the parts of one "
                    f"model hold each tensor once"
                )
            self.tensors[name] = tensor
        self._spans.update(part._spans)

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type[T] | tuple[type[T], ...]) -> T:
        """The value under `key`, which must be there and be of `kind`."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: the metadata has no key {key!r}, which this file needs")
        value = self.metadata[key]
        wanted = kind if isinstance(kind, tuple) else (kind,)
        # In Python a bool is an int too; in a GGUF file it is not.
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(one.__name__ for one in wanted)
            raise ValueError(
                f"{self.path}: metadata {key!r} is {_shown(value)}, of type {type(value).__name__}; "
                f"it must be of type {names}"
            )
        return value

    def optional(self, key: str, kind: type[T] | tuple[type[T], ...], default: D) -> T | D:
        """The value under `key`, which must be of `kind`; `default` where the file has no such key."""
        return self.require(key, kind) if key in self.metadata else default

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """The array under `key`, which must be there, with elements of `kind`.

        All elements of an array are of one type, so the first one tells.
        """
        values: list[T] = self.require(key, list)
        if values and type(values[0]) is not kind:
            raise ValueError(
                f"{self.path}: metadata {key!r} is an array of type {type(values[0]).__name__}; "
                f"its elements must be of type {kind.__name__}"
            )
        return values

    def data(self, tensor: GGUFTensorInfo) -> memoryview:
        """The packed bytes of one tensor, as a read-only view into the map (which the view keeps alive)."""
        return memoryview(self._spans[tensor.path][0])[tensor.offset : tensor.offset + tensor.nbytes]

    def prefetch(self) -> None:
        """Ask the system to read the tensor data ahead, just before all of it is used."""
        for data, data_start in self._spans.values():
            start = data_start // mmap.PAGESIZE * mmap.PAGESIZE
            if start < len(data):
                data.madvise(mmap.MADV_WILLNEED, start, len(data) - start)

    def release(self, tensor: GGUFTensorInfo) -> None:
        """Give back the memory in which the system shows a tensor that was read; it may be read again.

        A file that stays shown while it is decoded would be held beside all that was made of it.
        """
        data = self._spans[tensor.path][0]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.offset + tensor.nbytes - start
        if length:
            data.madvise(mmap.MADV_DONTNEED, start, length)

    def _read_alignment(self, entries: dict[str, object]) -> int:
        alignment = entries.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: general.alignment is {alignment!r}; it must be a power of two (usually "
                f"{DEFAULT_ALIGNMENT})"
            )
        return alignment

    def _place_tensors(self, table: list[_TensorEntry]) -> dict[str, GGUFTensorInfo]:
        tensors: dict[str, GGUFTensorInfo] = {}
        for entry in table:
            if entry.name in tensors:
                raise ValueError(f"{self.path}: tensor {entry.name!r} is listed twice")
            kind = GGML_TYPES.get(entry.type_number)
            if kind is None:
                raise ValueError(
                    f"{self.path}: tensor {entry.name!r} has the unknown type {entry.type_number}"
                )
            shape = tuple(reversed(entry.dimensions))
            columns = shape[-1] if shape else 1
            if columns % kind.block_elements:
                raise ValueError(
                    f"{self.path}: tensor {entry.name!r} of shape {list(shape)} has rows of {columns} "
                    f"values, which is not a multiple of {kind.block_elements}, the block of {kind.name}"
                )
            if entry.offset % self.alignment:
                raise ValueError(
                    f"{self.path}: tensor {entry.name!r} starts at {entry.offset}, which is not a multiple "
                    f"of the alignment {self.alignment}"
                )
            offset = self.data_start + entry.offset
            nbytes = kind.nbytes(math.prod(shape))
            if offset + nbytes > self.file_size:
                raise ValueError(
                    f"{self.path} is truncated: tensor {entry.name!r} of shape {list(shape)} ends at byte "
                    f"{offset + nbytes}, the file has {self.file_size} bytes; fetch the file again"
                )
            tensors[entry.name] = GGUFTensorInfo(entry.name, shape, kind, self.path, offset, nbytes)
        return tensors


class _TensorEntry(NamedTuple):
    name: str
    dimensions: tuple[int, ...]
    type_number: int
    offset: int


class _Reader:
    """Reads little-endian values at positions in the map.

    Each method returns the value and the position behind it.
    """

    def __init__(self, path: pathlib.Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)

    def preamble(self) -> int:
        """Check the magic and give the version."""
        magic = self._data[:4]
        if magic != MAGIC:
            raise ValueError(f"{self._path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
        version, _ = self.u32(4, "the version")
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = "it is a big-endian file" if swapped in SUPPORTED_VERSIONS else "convert it again"
            raise ValueError(
                f"{self._path}: GGUF version {version} is not one of {list(SUPPORTED_VERSIONS)}; {reason}"
            )
        return version

    def u32(self, position: int, what: str) -> tuple[int, int]:
        self._check(position, 4, what)
        return _U32.unpack_from(self._data, position)[0], position + 4

    def u64(self, position: int, what: str) -> tuple[int, int]:
        self._check(position, 8, what)
        return _U64.unpack_from(self._data, position)[0], position + 8

    def string(self, position: int, what: str) -> tuple[str, int]:
        length, position = self.u64(position, what)
        self._check(position, length, what)
        raw = self._data[position : position + length]
        try:
            return raw.decode("utf-8"), position + length
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}: {what} is not valid UTF-8: {error}") from error

    def check_count(self, what: str, count: int, smallest: int) -> None:
        if count * smallest > self._size:
            raise ValueError(
                f"{self._path} is corrupt: it announces {count} {what}, which need at least "
                f"{count * smallest} bytes, and the file has {self._size}"
            )

    def metadata(self, position: int, count: int) -> tuple[dict[str, object], int]:
        entries: dict[str, object] = {}
        for index in range(count):
            key, position = self.string(position, f"metadata key {index}")
            if key in entries:
                raise ValueError(f"{self._path}: metadata {key!r} is there twice")
            kind, position = self.u32(position, f"the type of metadata {key!r}")
            entries[key], position = self._value(kind, position, f"metadata {key!r}")
        return entries, position

    def tensor_table(self, position: int, count: int) -> tuple[list[_TensorEntry], int]:
        table: list[_TensorEntry] = []
        for index in range(count):
            name, position = self.string(position, f"the name of tensor {index}")
            what = f"tensor {name!r}"
            rank, position = self.u32(position, what)
            if rank > 8:
                raise ValueError(f"{self._path} is corrupt: {what} has {rank} dimensions")
            self._check(position, 8 * rank + 12, what)
            dimensions = struct.unpack_from(f"<{rank}Q", self._data, position)
            position += 8 * rank
            type_number, offset = struct.unpack_from("<IQ", self._data, position)
            position += 12
            table.append(_TensorEntry(name, dimensions, type_number, offset))
        return table, position

    def array(self, deferred: _Deferred, what: str) -> tuple[list[object], int]:
        """Decode an array whose extent was checked when the metadata was read."""
        kind, count, position = deferred
        if kind == _STRING:
            return self._strings(position, count, what)
        if kind == _ARRAY:
            arrays: list[object] = []
            for _ in range(count):
                inner, position = self._array_head(position, what)
                values, position = self.array(inner, what)
                arrays.append(values)
            return arrays, position
        end = position + count * _SCALAR_SIZES[kind]
        numbers = struct.unpack(f"<{count}{_SCALARS[kind]}", self._data[position:end])
        return (list(map(bool, numbers)) if kind == _BOOL else list(numbers)), end

    def _value(self, kind: int, position: int, what: str) -> tuple[object, int]:
        if kind == _STRING:
            return self.string(position, what)
        if kind == _ARRAY:
            deferred, position = self._array_head(position, what)
            return deferred, self._skip_array(deferred, what, 1)
        code = _SCALARS.get(kind)
        if code is None:
            raise ValueError(f"{self._path}: {what} has the unknown value type {kind}")
        size = _SCALAR_SIZES[kind]
        self._check(position, size, what)
        value = struct.unpack_from("<" + code, self._data, position)[0]
        return (bool(value) if kind == _BOOL else value), position + size

    def _array_head(self, position: int, what: str) -> tuple[_Deferred, int]:
        kind, position = self.u32(position, what)
        if kind not in _SCALARS and kind not in (_STRING, _ARRAY):
            raise ValueError(f"{self._path}: {what} is an array of the unknown value type {kind}")
        count, position = self.u64(position, what)
        return _Deferred(kind, count, position), position

    def _skip_array(self, deferred: _Deferred, what: str, depth: int) -> int:
        kind, count, position = deferred
        if depth > _DEEPEST_ARRAY:
            raise ValueError(
                f"{self._path} is corrupt: {what} nests arrays more than {_DEEPEST_ARRAY} levels deep"
            )
        smallest = 12 if kind == _ARRAY else 8 if kind == _STRING else _SCALAR_SIZES[kind]
        self._check(position, count * smallest, what)
        if kind == _STRING:
            return self._skip_strings(position, count, what)
        if kind == _ARRAY:
            for _ in range(count):
                inner, position = self._array_head(position, what)
                position = self._skip_array(inner, what, depth + 1)
            return position
        return position + count * smallest

    def _skip_strings(self, position: int, count: int, what: str) -> int:
        # Vocabularies have 50k to 260k entries and are walked at every start: one call an entry, no more.
        unpack, data = _U64.unpack_from, self._data
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            self._truncated(what, position + 8)
        if position > self._size:
            self._truncated(what, position)
        return position

    def _strings(self, position: int, count: int, what: str) -> tuple[list[object], int]:
        unpack, data = _U64.unpack_from, self._data
        values: list[object] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                values.append(data[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._path}: entry {len(values)} of {what} is not valid UTF-8: {error}"
            ) from error
        return values, position

    def _check(self, position: int, length: int, what: str) -> None:
        if position + length > self._size:
            self._truncated(what, position + length)

    def _truncated(self, what: str, end: int) -> NoReturn:
        raise ValueError(
            f"{self._path} is truncated or corrupt: {what} ends at byte {end}, the file has {self._size} "
            f"bytes; fetch the file again"
        )


def _shown(value: object) -> str:
    """A value for an error text, cut short: an array may be a whole vocabulary."""
    text = repr(value[:4] if isinstance(value, list) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _map_file(path: pathlib.Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ValueError(f"{path} has {size} bytes; the head of a GGUF file alone has 24")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
