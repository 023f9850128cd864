"""GGUF files: a model in one file, as people have it who run models on their own machines.

``header`` reads what a file says of itself, without numpy, and ``kinds`` names the kinds of tensors that are known;
``file`` reads the tensors, which ``dequantize`` expands. One file for each architecture (``llama``, ``qwen2``,
``qwen3``, ``gemma2``, ``gemma3``, ``phi3``) says how its header becomes a config and its tensors a model's, by what
``architecture``, ``rope`` and ``token_ids`` have for all of them; ``architectures`` knows them by name.

Importing this package imports nothing else.
"""
