"""Dense slot diffusion decoded in plain Python: one request, lists, no cache, greedy. Read this file first."""

import numpy as np

from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.transformer import Transformer


def one_by_one(model: Transformer, request: Request) -> dict:
    """The text of lossless drafting, one token per forward: what is given, then the gaps, left to right.

    A token is predicted by the one before it in the text if that was committed last, otherwise by a mask. Both see all
    that was committed.
    """
    plain, commits = ReferenceDecoder(model, request), []
    tokens, places = list(plain.given.values()), list(plain.given)
    for place in plain.places:
        mask = [] if places[-1] == place - 1 else [(plain.ids.mask_id, place)]
        fed, at = [*tokens, *(token for token, _ in mask)], [*places, *(at for _, at in mask)]
        p = plain.forward("next", fed, at, np.tri(len(fed), dtype=bool))
        tokens.append(plain.best(p[-1], place))
        places.append(place)
        commits.append((tokens[-1], place))
        if tokens[-1] == plain.ids.eos_id:
            break
    return plain.result(commits, len(commits))
