"""Checkpoints that are complete or absent.

    checkpoints/step_00001000/   shard-00001-....safetensors ...  the tensors of each rank
                                 state.json     counters, sums since the last record, position in the data
                                 config.yaml, tokenizer files
                                 MANIFEST.json  size and checksum of every file, the loss; written last

A checkpoint is written under another name, synced, read back and then renamed: a kill leaves the previous one.
`hooks/saving.py` writes it beside training. Any number of ranks reads it, in any layout.

    checkpoints/validation.json  the validation losses of checkpoints, by step

A state with NaN or an infinity is not saved, and of the checkpoints whose loss had not exploded the last one is kept.
"""

from ngpt_train.training.checkpoint.catalogue import find_checkpoint, last_good, list_checkpoints
from ngpt_train.training.checkpoint.load import load_model, load_state
from ngpt_train.training.checkpoint.save import Checkpoints

__all__ = ["Checkpoints", "find_checkpoint", "last_good", "list_checkpoints", "load_model", "load_state"]
