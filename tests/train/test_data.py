"""Text to rows: split, tokenisers, cache, packing, order, and that packed documents do not leak."""

import json
import sys
import types

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hmt_deepspeed.train import data as data_module
from hmt_deepspeed.train.data import prepare_data
from hmt_deepspeed.train.packing import IGNORED, GlobalOrder, PackedRows, share_of_rank
from hmt_deepspeed.train.sources import open_source, split_documents
from hmt_deepspeed.train.tokenizer import (
    byte_tokenizer,
    encode,
    load_tokenizer_file,
    save_tokenizer_file,
    train_bpe,
)

TEXT = "def plus(a, b):\n    return a + b  # é and \t tabs\n\n"


def write_documents(folder, count, repeat=20):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        (folder / f"{index:03d}.txt").write_text(f"document {index}\n" + TEXT * repeat)
    return folder


# -- sources ---------------------------------------------------------------------------------


def test_stdlib_is_sorted_python_source_without_tests_and_packages():
    source = open_source("stdlib")
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert "argparse.py" in names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests"}
    assert source.fingerprint() == open_source("stdlib").fingerprint()


def test_folder_reads_text_recursively_and_passes_over_binary_and_hidden(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b" / "c.md").write_text("second")
    (tmp_path / "b" / "picture").write_bytes(b"\xff\xd8\x00\x01")
    (tmp_path / ".hidden").write_text("no")
    assert list(open_source(str(tmp_path)).documents()) == ["first", "second"]


def test_jsonl_field_and_its_errors(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"body": "one"}) + "\n\n" + json.dumps({"body": "two"}) + "\n")
    assert list(open_source(str(path), "body").documents()) == ["one", "two"]
    with pytest.raises(ValueError, match=r"line 1 has no text under --text_field 'text'.*body"):
        list(open_source(str(path)).documents())
    path.write_text('{"body": "one"}\n{"body": }\n')
    with pytest.raises(ValueError, match="line 2, column"):
        list(open_source(str(path), "body").documents())


def test_missing_path_and_binary_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="does not exist"):
        open_source("corpus.txt")
    (tmp_path / "model.dat").write_bytes(b"\x00\x01\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(open_source(str(tmp_path / "model.dat")).documents())


def test_hub_dataset_goes_through_datasets_and_fails_clearly(monkeypatch):
    calls = []

    class Records(list):
        _fingerprint = "f00"

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        if name == "owner/gone":
            raise ConnectionError("no network")
        return Records([{"text": "one"}, {"text": "two"}])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = open_source("owner/name:raw")
    assert list(source.documents()) == ["one", "two"]
    assert calls == [("owner/name", "raw", "train")]
    assert "f00" in source.fingerprint()
    with pytest.raises(ValueError, match=r"'owner/gone' is neither a local path.*no network"):
        open_source("owner/gone").fingerprint()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'hmt_deepspeed\[hub\]'"):
        open_source("owner/name").fingerprint()


def test_fingerprint_follows_the_files(tmp_path):
    write_documents(tmp_path, 2)
    before = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == before
    (tmp_path / "001.txt").write_text("other")
    assert open_source(str(tmp_path)).fingerprint() != before


def test_every_twentieth_document_is_held_out():
    documents = [f"text {index}" for index in range(45)]
    held_out = [text for out, text in split_documents(["", *documents, " \n"]) if out]
    assert held_out == ["text 19", "text 39"]


def test_few_documents_are_cut_and_nothing_is_lost():
    text = "".join(f"line {index}\n" for index in range(1000))
    (first, head), (second, tail) = split_documents([text])
    assert (first, second) == (False, True)
    assert head + tail == text
    assert head.endswith("\n")
    assert len(tail) == pytest.approx(0.05 * len(text), abs=10)


# -- tokenisers ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe([TEXT * 50], 300)])
def test_own_tokenizers_are_lossless_and_read_no_special_token_out_of_text(make, tmp_path):
    tokenizer = make()
    text = TEXT + "<|eos|> \u4e2d\x00 don't  ."
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids)
    save_tokenizer_file(tokenizer, tmp_path / "t.json")
    assert encode(load_tokenizer_file(tmp_path / "t.json"), [text]) == [ids]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["eos_token"]


def test_byte_tokenizer_has_one_token_a_byte():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 258
    text = "aé中"
    assert len(encode(tokenizer, [text])[0]) == len(text.encode())


def test_vocab_size_out_of_range():
    with pytest.raises(ValueError, match="--vocab_size is 257; legal: 258"):
        train_bpe([TEXT], 257)


# -- packing ---------------------------------------------------------------------------------


def packed(lengths, seq_length):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return PackedRows(np.arange(100, 100 + sum(lengths), dtype=np.uint16), starts, seq_length)


def test_rows_restart_positions_and_mask_first_tokens():
    rows = packed([3, 7, 1, 5], 8)
    assert rows.num_rows == 2
    batch = rows.batch([0, 1])
    assert batch["input_ids"].tolist() == [list(range(100, 108)), list(range(108, 116))]
    # The second document goes on in row 1, where it is read from position 0 again.
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 0, 1, 2, 3, 4]]
    labels = batch["labels"]
    ignored = (labels == IGNORED).nonzero().tolist()
    assert ignored == [[0, 0], [0, 3], [1, 0], [1, 2], [1, 3]]
    assert torch.equal(labels[labels != IGNORED], batch["input_ids"][labels != IGNORED])


def test_count_labels_is_what_the_batch_holds():
    generator = np.random.default_rng(0)
    rows = packed(generator.integers(1, 12, size=200).tolist(), 16)
    for indices in (np.arange(rows.num_rows), np.array([3, 3, 7])):
        labels = rows.batch(indices)["labels"][:, 1:]
        assert rows.count_labels(indices) == int((labels != IGNORED).sum())


def test_order_is_a_permutation_an_epoch_and_depends_on_the_seed_only():
    order = GlobalOrder(10, seed=3)
    first, second = order.rows(0, 10), order.rows(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert GlobalOrder(10, seed=3).rows(7, 8).tolist() == [*first[7:], *second[:5]]
    assert GlobalOrder(10, seed=4).rows(0, 10).tolist() != first.tolist()
    assert len(GlobalOrder(3, seed=0).rows(1, 10)) == 10  # a batch over several epochs


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 12), (1, 3), (2, 3), (3, 2), (4, 1)])
def test_global_batch_is_the_same_rows_for_every_world_size(ranks, micro_batch):
    rows = GlobalOrder(100, seed=0).rows(24, 12)
    shares = [share_of_rank(rows, rank, ranks, micro_batch) for rank in range(ranks)]
    assert all(share.shape == (12 // ranks // micro_batch, micro_batch) for share in shares)
    assert [shares[i % ranks].ravel()[i // ranks] for i in range(12)] == rows.tolist()


def test_a_changed_document_does_not_change_its_neighbour_in_the_row():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    tokens = np.arange(32, dtype=np.uint16)
    changed = tokens.copy()
    changed[:12] = changed[:12][::-1]
    starts = np.array([0, 12])
    first, second = (
        model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        for batch in (PackedRows(x, starts, 32).batch([0]) for x in (tokens, changed))
    )
    assert torch.equal(first[:, 12:], second[:, 12:])
    assert not torch.equal(first[:, :12], second[:, :12])
    # What the second document reads is exactly itself: alone it gives the same logits.
    alone = model(input_ids=torch.arange(12, 32)[None], use_cache=False).logits
    torch.testing.assert_close(first[:, 12:], alone, rtol=1e-5, atol=1e-6)


# -- all of it -------------------------------------------------------------------------------


def test_prepare_holds_every_token_and_a_second_start_encodes_nothing(tmp_path, monkeypatch):
    folder = write_documents(tmp_path / "text", 40)
    arguments = (str(folder), "bpe", 32, 300)
    first = prepare_data(*arguments, cache_dir=str(tmp_path / "cache"))
    assert first.num_documents == 40
    tokens, starts = first.train.tokens, first.train.document_starts
    documents = [
        text for out, text in split_documents(open_source(str(folder)).documents()) if not out
    ]
    assert len(starts) == len(documents) == 38
    tokenizer = first.tokenizer
    for index, (begin, end) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True)):
        ids = tokens[begin:end].tolist()
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert tokenizer.decode(ids[1:-1]) == documents[index]

    def never(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr(data_module.tokenizers, "encode", never)
    monkeypatch.setattr(data_module.tokenizers, "train_bpe", never)
    second = prepare_data(*arguments, cache_dir=str(tmp_path / "cache"))
    assert second.digest == first.digest
    assert isinstance(second.train.tokens, np.memmap)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_torn_cache_is_made_again(tmp_path):
    folder = write_documents(tmp_path / "text", 3)
    arguments = (str(folder), "bytes", 32)
    first = prepare_data(*arguments, cache_dir=str(tmp_path / "cache"))
    (file,) = (tmp_path / "cache").rglob("train.tokens")
    file.write_bytes(file.read_bytes()[:-10])
    assert prepare_data(*arguments, cache_dir=str(tmp_path / "cache")).digest == first.digest


def test_long_documents_are_encoded_in_pieces_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("hmt_deepspeed.train.packing._PIECE_CHARACTERS", 50)
    monkeypatch.setattr("hmt_deepspeed.train.packing._BATCH_CHARACTERS", 120)
    (tmp_path / "one.txt").write_text(TEXT * 30)
    result = prepare_data(str(tmp_path / "one.txt"), "bytes", 64, cache_dir=str(tmp_path / "cache"))
    assert result.train.document_starts.tolist() == [0]
    joined = [*result.train.tokens[1:-1], *result.held_out.tokens[1:-1]]
    assert result.tokenizer.decode([int(token) for token in joined]) == TEXT * 30


def test_local_pretrained_tokenizer(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    folder = write_documents(tmp_path / "text", 2)
    arguments = {"seq_length": 32, "cache_dir": str(tmp_path / "cache")}
    ours = prepare_data(str(folder), "bytes", **arguments)
    theirs = prepare_data(str(folder), str(tmp_path / "tokenizer"), **arguments)
    assert theirs.digest == ours.digest
    with pytest.raises(ValueError, match="does not exist"):
        prepare_data(str(folder), str(tmp_path / "missing"), **arguments)


def test_too_little_text(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text(TEXT)
    arguments = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match="holds no text"):
        prepare_data(str(tmp_path / "empty"), seq_length=32, **arguments)
    with pytest.raises(ValueError, match=r"gives \d+ tokens to train on.*--seq_length 256"):
        prepare_data(str(tmp_path / "short.txt"), seq_length=256, **arguments)
    with pytest.raises(ValueError, match="--seq_length is 3; legal: at least 4"):
        prepare_data(str(tmp_path / "short.txt"), seq_length=3, **arguments)
