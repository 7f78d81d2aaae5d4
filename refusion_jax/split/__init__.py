"""One model over two machines: a device runs the first layers, a server the rest (arXiv 2511.04002)."""
