"""What flows between the rooms: rows of text, who sees whom, and what a model's logits are compared with."""
