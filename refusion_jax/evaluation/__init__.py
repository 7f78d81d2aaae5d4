"""Evaluation: tasks of lm-evaluation-harness, likelihood, and a sandbox for generated code."""
