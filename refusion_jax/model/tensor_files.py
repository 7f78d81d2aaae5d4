"""The tensors of a directory of safetensors files, on a local disk or in an object store, read one at a time.

A file consists of the size of its header in 8 bytes (little endian), the header, and the data. The header is a JSON
object, {name: {"dtype", "shape", "data_offsets"}}, whose offsets count from its end.
"""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pydantic
from etils import epath

from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.distributed.json_files import parse_json, read_json
from refusion_jax.distributed.storage import opened

MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}  # that weights may have
_LONGEST_HEADER = 100 << 20  # bytes, the format's own limit


class _Entry(pydantic.BaseModel):
    dtype: str
    shape: list[pydantic.NonNegativeInt]
    data_offsets: tuple[pydantic.NonNegativeInt, pydantic.NonNegativeInt]


class _Index(pydantic.BaseModel):
    """The file of each tensor, if there are several files, all in the directory of the index."""

    weight_map: dict[str, Annotated[str, pydantic.Field(pattern=r"^[^/\x00]+$")]]


class Tensors:
    """The tensors of a directory by name."""

    def __init__(self, directory: epath.PathLike, file: str = MODEL):
        """Reads the headers of all files: those of the index, or else of the file of this name.

        UserError if a file is missing, unreadable or truncated, or if tensors are not where the index says.
        """
        self._directory = directory = epath.Path(directory)
        self._entries: dict[str, tuple[str, int, _Entry]] = {}  # file, where its data begins
        self.metadata: dict[str, str] = {}  # of the headers
        if file != MODEL or not (directory / INDEX).exists():
            self._add(file)
            return
        places = read_json(directory / INDEX, _Index, extra="ignore").weight_map
        if MODEL not in places.values() and (directory / MODEL).exists():
            raise UserError(f"{directory} holds two models, {MODEL} and that of {INDEX}: remove one of them")
        for file in sorted(set(places.values())):
            self._add(file)
        for name, (file, *_) in self._entries.items():
            if places.get(name) != file:
                raise UserError(f"{directory / INDEX}: {name} is in {file}, not in {places.get(name)}")

    def _add(self, file: str) -> None:
        path = self._directory / file
        with opened(path) as data:
            size = int.from_bytes(data.read(8), "little")
            content = data.read(min(size, _LONGEST_HEADER))
        header = parse_json(content, dict[str, _Entry | dict[str, str]], f"{path} is damaged") if content else {}
        self.metadata |= header.pop("__metadata__", {})
        with refusing(f"{path} is damaged"):
            end = max((entry.data_offsets[1] for entry in header.values()), default=0)
        if 8 + size + end != path.stat().length:
            raise UserError(f"{path} is damaged: it is not as long as its header says")
        self._entries |= {name: (file, 8 + size, entry) for name, entry in header.items()}

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    @property
    def dtypes(self) -> set[str]:
        """Those of the tensors that we read, by their names in the files."""
        return {entry.dtype for _, _, entry in self._entries.values()} & DTYPES.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor; UserError if it does not exist, has another shape or holds no floats."""
        if name not in self._entries:
            raise UserError(f"{self._directory} holds no tensor {name}")
        file, start, entry = self._entries[name]
        path, found, (begin, end) = self._directory / file, tuple(entry.shape), entry.data_offsets
        if entry.dtype not in DTYPES:
            raise UserError(f"{path}: {name} has dtype {entry.dtype}; we read {', '.join(DTYPES)}")
        if found != shape:
            raise UserError(f"{path}: {name} has shape {found}, but config.json makes it {shape}")
        with opened(path) as data:
            data.seek(start + begin)
            content = data.read(end - begin)
        with refusing(f"{path} is damaged"):
            return np.frombuffer(content, DTYPES[entry.dtype]).reshape(shape)

    def place_of(self, name: str) -> epath.Path:
        return self._directory / self._entries[name][0]
