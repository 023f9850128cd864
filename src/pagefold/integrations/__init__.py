"""Other people's engines: Pagefold's cache inside vLLM, and Pagefold's servers on Ray."""
