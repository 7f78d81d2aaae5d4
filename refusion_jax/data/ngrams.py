"""Hashes of the word n-grams of a text, to find near-duplicates and parts of test questions.

Axes: W words, N n-grams, H hashes.
"""

import hashlib
import re
import zlib

import numpy as np

_WORDS = re.compile(r"\w+")
_BANDS, _BAND = 20, 8  # of MinHash; datatrove has 14 bands, which find 92 % of the pairs whose n-grams overlap by 0.8
_WORDS_OF_SHINGLE = 5
_BLOCK = 1 << 12  # n-grams hashed at a time: 5 MB
_RANDOM = np.random.Generator(np.random.PCG64(1)).integers(0, 2**64, (2, _BANDS * _BAND), np.uint64)
_FLIP, _FACTOR = _RANDOM[0], _RANDOM[1] | 1


def ngram_hashes(text: str, n: int) -> np.ndarray:
    """[N] uint64: a hash of every n consecutive words, ignoring case and what separates them."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORDS.findall(text.lower())], np.uint64)
    count = max(len(words) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for place in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[place : place + count]
        hashes ^= hashes >> np.uint64(29)
    return hashes


def band_digests(text: str) -> list[bytes]:
    """A digest of 16 bytes for each band of the text's MinHash; none for a text of fewer than five words.

    Two texts share one of them with probability 1 - (1 - s^8)^20, where s is the Jaccard similarity of their 5-grams
    (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, chapter 3): 0.975 at s = 0.8, 0.08 at 0.5, 1e-6 at 0.1.
    """
    shingles = ngram_hashes(text, _WORDS_OF_SHINGLE)
    if not len(shingles):
        return []
    least = np.full(len(_FLIP), 2**64 - 1, np.uint64)  # [H]
    for start in range(0, len(shingles), _BLOCK):
        block = (shingles[start : start + _BLOCK, None] ^ _FLIP) * _FACTOR
        np.minimum(least, block.min(axis=0), out=least)
    bands = least.reshape(_BANDS, _BAND)
    return [hashlib.blake2b(bytes([at]) + band.tobytes(), digest_size=16).digest() for at, band in enumerate(bands)]
