"""What models are trained on: text as token ids, its shards, and batches that need no history."""

from islands.data.batches import Batches, validation_windows
from islands.data.corpus import Corpus, load_corpus
from islands.data.shards import Shard, split

__all__ = ["Batches", "Corpus", "Shard", "load_corpus", "split", "validation_windows"]
