"""Batches of calls: their files, their queue, the worker that runs them."""
