"""Structured output: what an output must look like, compiled into which tokens may come next."""
