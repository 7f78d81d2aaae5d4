"""Dense slot diffusion decoded in plain Python: one request, lists, no cache, greedy. Read this file first."""

from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.model.transformer import Transformer


def one_by_one(model: Transformer, request: Request) -> dict:
    """The text of lossless drafting, one token per forward: what is given, then the gaps, left to right.

    A token is predicted by the one before it in the text if that was committed last, otherwise by a mask. Both see all
    that was committed.
    """
    plain = ReferenceDecoder(model, request)
    for place in plain.places:
        mask = [] if next(reversed(plain.text)) == place - 1 else [place]
        fed = [*plain.text, *mask]
        plain.text[place] = plain.best(plain.forward("next", plain.tokens(fed), fed)[-1], place)
        if plain.has_ended:
            break
    return plain.result()
