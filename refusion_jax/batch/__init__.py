"""The data structures that all packages share: packed rows, attention masks, and training batches."""
