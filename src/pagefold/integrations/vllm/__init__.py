"""Pagefold inside vLLM: classes that vLLM loads by the path of their module. Decisions stay in ``pagefold.kv``."""
