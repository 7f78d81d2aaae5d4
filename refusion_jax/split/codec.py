"""The encoding of hidden states on the link: as bytes, exactly or within an error bound.

Threshold splitting and token-wise adaptive bit quantization, after "Memory- and Latency-Constrained Inference of Large
Language Models via Adaptive Split Computing" (arXiv 2511.04002; we have read its abstract and reviews of it, so that
the formulas are ours). With r the root mean square of a token's values:

* values of magnitude above `threshold` r are outliers: they are sent as (index, float32), without error;
* with m the largest magnitude of the others, a token has the fewest bits b of 2 to 16 for which the step
  s = m / (2^(b-1) - 1) is at most 2 `tolerance` r. A value is sent as round(x / s), so that its error is at most
  s / 2 <= `tolerance` r. (At 16 bits the bound is s / 2 whatever the tolerance; this needs a tolerance below 2e-5.)

The integers of a message are packed, b bits each, or coded by DEFLATE's Huffman codes if these are shorter, as they are
from a few tokens on: Python has no other entropy coder. Exact values are coded byte by byte: first the lowest byte of
all, and so on; signs and exponents take a third of their byte (0.84 of float32, 0.67 of bfloat16), the rest is noise.

Axes: T tokens, D hidden size.
"""

import dataclasses
import io
import math
import zlib

import numpy as np
from jaxtyping import Float, Float32, Int, Int32

_LEAST_BITS, _MOST_BITS = 2, 16


@dataclasses.dataclass(frozen=True)
class Codec:
    """How hidden states are written as bytes."""

    bits: int = 0  # of every value; 0: as many as each token needs for the tolerance
    threshold: float = 1e9  # a value above this multiple of its token's root mean square is an outlier
    tolerance: float = 0.0  # the largest error of a value, in root mean squares of its token

    def bytes_per_token(self, D: int, itemsize: int) -> float:
        """Bytes of D normally distributed values, of which at most 0.6 % are outliers; not deflated."""
        if not (self.bits or self.tolerance):
            return D * (itemsize - _SAVED)
        levels = self.threshold / (2 * self.tolerance / _ROUNDING) if self.tolerance else 0
        bits = self.bits or math.ceil(math.log2(levels + 1)) + 1
        outliers = 0.006 * D * (4 + np.dtype(_index_type(D)).itemsize) if self.tolerance else 0
        return 4 + D * bits / 8 + outliers

    def encode(self, x: Float[np.ndarray, "T D"]) -> bytes:
        """The tokens as bytes, without their number and dtype; FloatingPointError if a value is not finite."""
        if not (self.bits or self.tolerance):
            return _encode_exactly(x)
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise FloatingPointError("a hidden state is not finite")
        rms = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1))
        is_outlier = np.abs(x) > self.threshold * rms[:, None]
        most = np.max(np.abs(np.where(is_outlier, 0, x)), axis=1, initial=0)
        bits = np.full(len(x), self.bits)
        if not self.bits:
            levels = most / np.maximum(2 * self.tolerance * rms / _ROUNDING, np.finfo(np.float64).tiny)
            bits = np.ceil(np.log2(levels + 1)).astype(int) + 1
            bits = np.clip(bits, _LEAST_BITS, _MOST_BITS)
        half = (1 << (bits - 1)) - 1  # the largest integer
        steps = np.maximum(most / half, np.finfo(np.float32).tiny).astype("<f4")
        upper = (steps.view("<u4") >> 16).astype("<u2") + np.uint16(1)  # of the next float32 whose lower half is 0
        steps = _from_upper(upper)
        numbers = np.rint(np.where(is_outlier, 0, x) / steps[:, None]).astype(np.int32)
        rows, places = np.nonzero(is_outlier)
        parts = [
            upper.tobytes(),
            bits.astype(np.uint8).tobytes(),
            np.bincount(rows, minlength=len(x)).astype("<u4" if x.shape[1] > 255 else "u1").tobytes(),
            places.astype(_index_type(x.shape[1])).tobytes(),
            x[is_outlier].astype("<f4").tobytes(),
        ]
        packed = b"".join(_pack(numbers[bits == b] + half[bits == b][0], b) for b in np.unique(bits))
        deflated = _deflate(numbers.astype(np.int8)) if np.max(bits, initial=0) <= 8 else packed
        is_deflated = len(deflated) < len(packed)
        return b"".join([bytes([is_deflated]), *parts, deflated if is_deflated else packed])

    def decode(self, content: bytes, n: int, D: int, dtype: np.dtype) -> Float[np.ndarray, "T D"]:
        """The values that `encode` was given, within the bound."""
        if not (self.bits or self.tolerance):
            return _decode_exactly(content, n, D, np.dtype(dtype))
        parts = _Parts(content)
        (is_deflated,) = parts.take("u1", 1)
        steps = _from_upper(parts.take("<u2", n))
        bits = parts.take("u1", n).astype(int)
        counts = parts.take("<u4" if D > 255 else "u1", n).astype(int)
        places = parts.take(_index_type(D), counts.sum()).astype(int)
        outliers = parts.take("<f4", counts.sum())
        half = (1 << (bits - 1)) - 1
        if is_deflated:
            numbers = _inflate(parts.read()).view(np.int8).reshape(n, D).astype(np.int32)
        else:
            numbers = np.zeros((n, D), np.int32)
            for b in np.unique(bits):
                own = bits == b
                numbers[own] = _unpack(parts, own.sum(), D, b) - half[own][0]
        x = numbers * steps[:, None]
        x[np.repeat(np.arange(n), counts), places] = outliers
        return x.astype(dtype)


# By name: exact; 8 bits for every value; separate outliers, and as many bits as each token needs.
CODECS = {"exact": Codec(), "int8": Codec(bits=8), "adaptive": Codec(threshold=2.75, tolerance=0.2)}

_SAVED = 0.65  # bytes of an exact value, by its code
_ROUNDING = 1 + 2.0**-7  # factor by which a step is rounded up, at most


def _from_upper(x: np.ndarray) -> Float32[np.ndarray, "T"]:
    return (x.astype("<u4") << 16).view("<f4")


def _index_type(D: int) -> str:
    return "u1" if D <= 256 else "<u2" if D <= 65536 else "<u4"


def _pack(x: Int32[np.ndarray, "T D"], bits: int) -> bytes:
    """Packs numbers from 0 to 2^bits - 1 into `bits` bits each, from the lowest bit on."""
    return np.packbits((x[..., None] >> np.arange(bits)) & 1).tobytes()


def _unpack(parts: "_Parts", n: int, D: int, bits: int) -> Int[np.ndarray, "T D"]:
    size = n * D * int(bits)
    ones = np.unpackbits(parts.take("u1", -(-size // 8)), count=size).reshape(n, D, bits)
    return ones @ (1 << np.arange(bits))


def _encode_exactly(x: Float[np.ndarray, "T D"]) -> bytes:
    """The length of each byte plane's code, 0 if it is not coded; then the bytes."""
    planes = np.ascontiguousarray(x.reshape(-1, 1).view(np.uint8).T)
    coded = [_deflate(plane) for plane in planes]
    coded = [code if len(code) < planes.shape[1] else b"" for code in coded]
    lengths = np.array([*map(len, coded)], "<u4").tobytes()
    return lengths + b"".join(code or plane.tobytes() for code, plane in zip(coded, planes, strict=True))


def _decode_exactly(content: bytes, n: int, D: int, dtype: np.dtype) -> Float[np.ndarray, "T D"]:
    parts, size = _Parts(content), n * D
    lengths = parts.take("<u4", dtype.itemsize)
    planes = [_inflate(parts.read(x)) if x else parts.take("u1", size) for x in lengths]
    return np.stack(planes, axis=1).view(dtype).reshape(n, D)


def _deflate(x: np.ndarray) -> bytes:
    coder = zlib.compressobj(9, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(x.tobytes()) + coder.flush()


def _inflate(content: bytes) -> np.ndarray:
    return np.frombuffer(zlib.decompress(content, wbits=-15), np.uint8)


class _Parts(io.BytesIO):
    """Reads consecutive arrays from bytes."""

    def take(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.read(np.dtype(dtype).itemsize * int(count)), dtype)
