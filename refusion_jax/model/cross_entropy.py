"""Cross-entropy of an output head without storing the logits of all tokens.

The vocabulary is processed in chunks and the tokens in blocks, so that logits exist for one chunk of one block at a
time. Each chunk of the head is gathered from the chips that share it and dropped after use; its gradient is summed and
scattered likewise. The backward pass recomputes the logits: one more product with the head, for memory that does
not grow with tokens x vocabulary. Tokens without a label are sorted to the back, and blocks of them are skipped.

Axes, on one chip: B rows, T row length, D hidden size, V rows of the head; R tokens of a block, N blocks of them,
W rows of a chunk of the head, C chunks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.distributed import sharding

BLOCK = 2048  # tokens: enough to keep a matrix unit busy
CHUNK = 16_384  # rows of the head: 128 MiB of float32 logits per block
_NO_ROW = jnp.iinfo(jnp.int32).max  # in place of a row of the head; no label, counted from the first row of any chip


@jax.custom_vjp
def linear_cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int32[Array, "B T"],
    is_labelled: Bool[Array, "B T"],
) -> Float32[Array, "B T"]:
    """-log softmax(x @ head.T)[label] of every labelled token, 0 elsewhere.

    The products run in x's dtype, float32 or bfloat16, and are summed in float32. Differentiable in x, split over the
    mesh as "batch", "length", None, and in the head, split as "vocab", "embed". Labels are rows of the head.
    """
    return _forward(x, head, labels, is_labelled)[0]


def _specs():
    """Shardings of x and the head, and of arrays with one value per token."""
    x = sharding.spec("batch", "length", None)
    return (x, sharding.spec("vocab", "embed")), sharding.spec("batch", "length")


def _forward(x, head, labels, is_labelled):
    own, tokens = _specs()
    run = sharding.on_each_chip(_local_forward, (*own, tokens, tokens), (tokens, tokens))
    cross_entropy, log_normalizer = run(x, head, labels, is_labelled)
    return cross_entropy, (x, head, labels, is_labelled, log_normalizer)


def _backward(kept, cotangent):
    own, tokens = _specs()
    run = sharding.on_each_chip(_local_backward, (*own, *[tokens] * 4), own)
    return *run(*kept, cotangent), None, None


linear_cross_entropy.defvjp(_forward, _backward)


def _blocks(x, labels, is_labelled) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(the tokens of one chip in blocks, labelled ones first, padding at the end; their original indices, [B * T]).

    The blocks are [N, R, D], their labels [N, R], and whether they have any label, [N].
    """
    tokens = labels.size
    order = jnp.argsort(~is_labelled.ravel(), stable=True)
    count = -(-tokens // BLOCK)
    size = -(-tokens // count)
    has_label = jnp.arange(count) * size < jnp.sum(is_labelled)
    x, labels = x.reshape(tokens, -1)[order], labels.ravel()[order]
    return (_split(x, count, size), _split(labels, count, size), has_label), order


def _split(values, count: int, size: int):
    """[tokens, ...] -> [N, R, ...], padded with zeros."""
    room = ((0, count * size - values.shape[0]), *((0, 0),) * (values.ndim - 1))
    return jnp.pad(values, room).reshape(count, size, *values.shape[1:])


def _restore(values, order, shape):
    """[N, R, ...] of sorted tokens -> [*shape, ...] in the original order."""
    values = values.reshape(-1, *values.shape[2:])[: order.size]
    return jnp.zeros_like(values).at[order].set(values, unique_indices=True).reshape(*shape, *values.shape[1:])


def _chunks(head) -> tuple[jax.Array, jax.Array]:
    """([C, D, W], padded with zeros; [C, W] int32, the row of the head in each place, _NO_ROW in padding).

    D comes first, so that gathering and scattering the shards of D moves whole lanes of a TPU.
    """
    rows = head.shape[0]
    count = -(-rows // CHUNK)
    size = -(-rows // count)
    if count > 1:
        size = -(-size // 128) * 128  # whole lanes of a TPU
        count = -(-rows // size)
    row = jnp.arange(count * size).reshape(count, size)
    return _split(head, count, size).swapaxes(1, 2), jnp.where(row < rows, row, _NO_ROW)


def _chunk_logits(x, chunk, row):
    """[R, W] float32; -inf for padding."""
    logits = jnp.einsum("rd,dw->rw", x, chunk, preferred_element_type=jnp.float32)
    return jnp.where(row[None] < _NO_ROW, logits, -jnp.inf)


def _local_forward(x, head, labels, is_labelled):
    blocks, order = _blocks(x, labels - len(head) * sharding.shard_index("vocab"), is_labelled)

    def chunk_step(carry, chunk_and_row):
        chunk, row = chunk_and_row
        chunk = sharding.all_gather(chunk.astype(x.dtype), "embed", axis=0)

        def block_step(_, block):
            (tokens, targets, has_label), (high, total, picked) = block

            def add(high, total, picked):
                logits = _chunk_logits(tokens, chunk, row)
                higher = jnp.maximum(high, logits.max(axis=-1))
                total = total * jnp.exp(high - higher) + jnp.exp(logits - higher[:, None]).sum(axis=-1)
                picked = picked + jnp.where(targets[:, None] == row[None], logits, 0).sum(axis=-1)
                return higher, total, picked

            return None, jax.lax.cond(has_label, add, lambda *same: same, high, total, picked)

        return jax.lax.scan(block_step, None, (blocks, carry))[1], None

    zeros = jnp.zeros(blocks[1].shape, jnp.float32)
    start = (jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros, zeros)
    high, total, picked = jax.lax.scan(chunk_step, start, _chunks(head))[0]
    highest = sharding.all_max(high, "vocab")
    total, picked = sharding.all_sum((total * jnp.exp(high - highest), picked), "vocab")
    log_normalizer = _restore(highest + jnp.log(total), order, labels.shape)
    cross_entropy = log_normalizer - _restore(picked, order, labels.shape)
    # In the backward pass exp(logits - inf) is 0 for tokens without a label; without a normalizer it could overflow.
    return jnp.where(is_labelled, cross_entropy, 0), jnp.where(is_labelled, log_normalizer, jnp.inf)


def _local_backward(x, head, labels, is_labelled, log_normalizer, cotangent):
    blocks, order = _blocks(x, labels - len(head) * sharding.shard_index("vocab"), is_labelled)
    (N, R), scale = blocks[1].shape, jnp.where(is_labelled, cotangent, 0).ravel()[order]
    scale, normalizer = (_split(values, N, R) for values in (scale, log_normalizer.ravel()[order]))

    def chunk_step(dx, chunk_and_row):
        chunk, row = chunk_and_row
        chunk = sharding.all_gather(chunk.astype(x.dtype), "embed", axis=0)

        def block_step(sums, block):
            index, (tokens, targets, has_label), scale, normalizer = block

            def add(dchunk, dx):
                logits = _chunk_logits(tokens, chunk, row)
                dlogits = jnp.exp(logits - normalizer[:, None]) - (targets[:, None] == row[None])
                # Rounded once: without the barrier XLA keeps the logits in float32 and rounds them in both products.
                dlogits = jax.lax.optimization_barrier((dlogits * scale[:, None]).astype(x.dtype))
                dx = dx.at[index].add(jnp.einsum("rw,dw->rd", dlogits, chunk, preferred_element_type=jnp.float32))
                dchunk += jnp.einsum("rd,rw->dw", tokens, dlogits, preferred_element_type=jnp.float32)
                return dchunk, dx

            return jax.lax.cond(has_label, add, lambda *same: same, *sums), None

        zeros = jnp.zeros(chunk.shape, jnp.float32)
        each = jnp.arange(N), blocks, scale, normalizer
        (dchunk, dx), _ = jax.lax.scan(block_step, (zeros, dx), each)
        return dx, sharding.scatter_sum(dchunk, "embed", axis=0)

    dx, dhead = jax.lax.scan(chunk_step, jnp.zeros(blocks[0].shape, jnp.float32), _chunks(head))
    dx = sharding.all_sum(_restore(dx, order, labels.shape).astype(x.dtype), "vocab")
    dhead = dhead.swapaxes(1, 2).reshape(-1, head.shape[1])[: len(head)]
    return dx, sharding.all_sum(dhead, "batch", "length", but="embed").astype(head.dtype)
