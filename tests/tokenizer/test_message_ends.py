"""With which tokens messages end: as the chat template of the built-in model has it, and of made-up ones."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pagefold.tokenizer import Tokenizer as ModelTokenizer
from pagefold.tokenizer.message_ends import SAMPLE_CHAT, end_token_ids

CONTENTS = [message["content"] for message in SAMPLE_CHAT]


@pytest.fixture(scope="module")
def backend():
    words = ["[UNK]", *CONTENTS, "user", "model", "Q", "A", ":"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<turn>", "<end>", "<stop>"])
    made.add_tokens([AddedToken("<plain>", special=False)])
    return made


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("<turn> user Alpha <end> <turn> model Beta <end> <turn> user Gamma <end>", {"<end>"}),
        ("<turn> Alpha <end> Beta <stop> <turn> Gamma <end>", {"<end>", "<stop>"}),
        ("Q : Alpha A : Beta Q : Gamma A :", set()),
        ("Alpha <plain> Beta <end> Gamma <plain>", {"<end>"}),
        ("<turn> Alpha <end> <turn> Gamma <end>", set()),  # a template that leaves messages out says nothing
    ],
)
def test_messages_end_with_the_first_special_token_behind_them(backend, text, ends):
    assert end_token_ids(backend, text, CONTENTS) == {backend.token_to_id(end) for end in ends}


def test_the_built_in_model_ends_messages_as_its_template_says(smollm2):
    tokenizer = ModelTokenizer(smollm2)
    (end,) = tokenizer.message_end_ids
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    token_ids = tokenizer.encode_chat(chat)
    assert token_ids.count(end) == 2
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [end]
