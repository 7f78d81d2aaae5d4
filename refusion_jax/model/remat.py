"""Activation checkpointing, by policy: what is kept for the backward pass instead of being computed again.

Values are named (`checkpoint_name`) where the transformer computes them; a policy says which named values to keep.
"""

from collections.abc import Callable

import jax

INPUT, ATTENTION = "layer_input", "attention"  # of a layer
PROJECTION, GATE, UP = "projection", "gate", "up"  # products: those of attention with weights; the two wide ones
EXPERT, GATHERED = "expert", "gathered"  # the same products of experts, and their weights from all chips

# From the most memory to the least; None: everything is kept.
REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "products": jax.checkpoint_policies.save_only_these_names(ATTENTION, PROJECTION, GATE, UP, EXPERT),
    "outputs": jax.checkpoint_policies.save_only_these_names(ATTENTION, GATE, UP, EXPERT),
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
WITHOUT_GATHERED = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)  # in place of None, with experts
HELP = (
    "what the backward pass recomputes: none | products (keeps those with weights, and attention) | "
    "outputs (keeps attention and MLP) | attention (keeps only that) | full | offload"
)
